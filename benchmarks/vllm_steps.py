"""vLLM's decode steps with its own attention and with this package's, on the CPU.

``.ci/vllm`` makes the environment and the model::

    KVCACHE_DPEX_SMOLLM2=build/vllm/smollm2 build/vllm/bin/python -m benchmarks vllm_steps

Every engine runs in a process of its own. Tokens are compared before times are printed: in float32 they must
be those of stock vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .measure import _processor, commit

RUN = Path(__file__).with_name("vllm_run.py")
WORDS = ["tree", "river", "stone", "cloud", "paper", "glass", "metal", "wood"]
STEPS, REPEATS, SEQUENCES = 32, 3, (1, 8)
TEXT = (Path(__file__).parents[1] / "LICENSE").read_text()[:1800]
CONTENDERS = {
    "stock vLLM, float32": (False, "auto"),
    "kvcache_dpex, float32": (True, "auto"),
    "kvcache_dpex, int8_per_token_head": (True, "int8_per_token_head"),
    "kvcache_dpex, fp8_per_token_head": (True, "fp8_per_token_head"),
}


def prompts_of(count: int) -> list[str]:
    """Prompts of about 100 tokens that have no prefix in common."""
    return [f"{word} " * 100 + "is a thing that" for word in WORDS[:count]]


def run(ours: bool, kv_cache_dtype: str, batches: list[dict]) -> dict:
    """What an engine generated for batches of prompts, and in what time."""
    engine = {"model": os.environ["KVCACHE_DPEX_SMOLLM2"], "kv_cache_dtype": kv_cache_dtype}
    done = subprocess.run(
        [sys.executable, str(RUN), json.dumps({"engine": engine, "batches": batches})],
        env={**os.environ, "KVCACHE_DPEX_VLLM": str(int(ours))},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def measure(ours: bool, kv_cache_dtype: str) -> dict:
    """Tokens, losses, capacity, and the milliseconds of a decode step for each number of sequences."""
    batches: list[dict] = [{"prompts": [TEXT], "max_tokens": 1, "prompt_logprobs": 0}]
    for count in SEQUENCES:
        prompts = prompts_of(count)
        batches += [{"prompts": prompts, "max_tokens": 1}, {"prompts": prompts, "max_tokens": STEPS + 1}] * (
            REPEATS + 1
        )
    found = run(ours, kv_cache_dtype, batches)
    steps = []
    for number in range(len(SEQUENCES)):
        first = 1 + 2 * (REPEATS + 1) * number + 2  # without the round that reads the prompts
        seconds = found["seconds"][first : first + 2 * REPEATS]
        pairs = zip(seconds[::2], seconds[1::2])
        steps.append(1000 * statistics.median((long - short) / STEPS for short, long in pairs))
    tokens = [each for batch in found["tokens"][1:] for each in batch]
    return {**found, "tokens": tokens, "loss": found["losses"][0][0], "steps": steps}


def agreement(one: list, other: list) -> float:
    """The part of the tokens that are equal, each sequence with its own."""
    pairs = [pair for ours, theirs in zip(one, other) for pair in zip(ours, theirs)]
    return sum(a == b for a, b in pairs) / len(pairs)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    found = {name: measure(*which) for name, which in CONTENDERS.items()}
    stock, ours = found["stock vLLM, float32"], found["kvcache_dpex, float32"]
    if ours["tokens"] != stock["tokens"]:
        raise SystemExit("tokens in float32 differ from those of stock vLLM: no times are printed")
    steps = [f"ms a step, {count} sequences" for count in SEQUENCES]
    table = Table("attention, cache", "tokens in 1 GiB", "loss", "tokens as stock", *steps)
    for name, each in found.items():
        same = f"{100 * agreement(each['tokens'], stock['tokens']):.1f} %"
        times = [f"{time:.1f}" for time in each["steps"]]
        table.add_row(name, f"{each['capacity']:,}", f"{each['loss']:.4f}", same, *times)
    console = Console()
    console.print(
        f"SmolLM2-135M, {STEPS} tokens after prompts of about 100, median of {REPEATS} rounds; loss of a "
        f"text; {_processor()}, commit {commit()}"
    )
    console.print(table)


if __name__ == "__main__":
    main()
