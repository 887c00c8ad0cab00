"""Every packaged module on the GPU against the oracle, bit for bit, and under compute-sanitizer.

``python -m benchmarks.nvidia.verify FOLDER [FAULT]`` runs the small cases, for compute-sanitizer to watch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvcache_dpex.runtime.compile import store
from tests.gates.cases import (
    CODES,
    SENTINEL,
    SLOT_TYPES,
    VALUE_TYPES,
    Case,
    all_cases,
    compare,
    dequantize_case,
    owner,
    quantize_case,
    start,
    write_case,
)
from tests.gates.standin import Array, Device, Queue, launches_through

from .cuda import Translated, to_device

MARGIN = 4096
# Heads and head sizes of models in use, and token counts from one to a long prompt.
HEADS = ((8, 128), (1, 64), (2, 80), (3, 64), (4, 256), (5, 46), (32, 128))
TOKENS = (1, 7, 8, 257)


def large_cases() -> list[Case]:
    """The shapes of models, in every dtype and layout."""
    rng = np.random.default_rng(11)
    found = []
    for heads, size in HEADS:
        for tokens in TOKENS:
            slot = SLOT_TYPES[tokens % 2]
            for layout in ("contiguous", "packed", "interleaved"):
                shape = (tokens, heads, (size, size), layout, slot)
                found += [write_case(rng, dtype, *shape, blocks=40) for dtype in ("float16", "float32")]
                found += [
                    quantize_case(rng, value, *shape, format, blocks=40)
                    for value in VALUE_TYPES
                    for format in CODES
                ]
        found += [
            dequantize_case(rng, value, (33, 16, heads, size), block, format)
            for value in VALUE_TYPES
            for block in (None, *SLOT_TYPES)
            for format in CODES
        ]
    found.append(write_case(rng, "float16", 4096, 8, (128, 128), "contiguous", "int64", blocks=1100))
    found.append(
        quantize_case(
            rng, "float16", 4096, 8, (128, 128), "contiguous", "int64", "int8_per_token_head", blocks=1100
        )
    )
    return found


def every_case() -> list[Case]:
    return [*all_cases(), *large_cases()]


def run_case(case: Case, translated: Translated, device: Device, margin: int) -> list[str]:
    """Run on the GPU; what differs from the oracle, bytes around each buffer included."""
    own = case.copy()
    buffers = {id(buffer): buffer for buffer in map(owner, own.arguments.values())}
    memory = {key: to_device(buffer, margin, SENTINEL) for key, buffer in buffers.items()}
    queue = Queue(device)

    def array(view: np.ndarray) -> Array:
        return Array(view, memory[id(owner(view))].data_ptr() + margin + start(view), queue)

    with launches_through(translated.launcher, scratch_memory):
        own.call({name: array(view) for name, view in own.arguments.items()})
    torch.cuda.synchronize()
    found = []
    for key, buffer in buffers.items():
        after = memory[key].cpu().numpy()
        before, content, behind = np.split(after, [margin, after.size - margin])
        if (before != SENTINEL).any() or (behind != SENTINEL).any():
            found.append("bytes outside of a buffer changed")
        buffer.reshape(-1).view(np.uint8)[:] = content
    return found + compare(own, case.expected())


def scratch_memory(size: int) -> SimpleNamespace:
    memory = torch.full((size,), SENTINEL, dtype=torch.uint8, device="cuda")
    return SimpleNamespace(_pointer=memory.data_ptr(), memory=memory)


def run_cases(translated: Translated, cases: list[Case], margin: int = MARGIN) -> dict[str, Any]:
    """Run cases with a GPU's launches, small ones and 8 heads of 128 also with those of the CPU device."""
    wrong = []
    small = {case.name for case in all_cases()}
    as_cpu = Device(1024, is_cpu=True)
    runs = [(case, Device()) for case in cases]
    runs += [(case, as_cpu) for case in cases if case.name in small or "x8x128-" in case.name]
    for case, device in runs:
        found = run_case(case, translated, device, margin)
        if found:
            wrong.append(f"{case.name}: {'; '.join(found)}")
    never = sorted(set(store.manifest()["modules"]) - translated.launched)
    return {"runs": len(runs), "wrong": len(wrong), "examples": wrong[:5], "never_launched": never}


def no_barriers(ptx: str) -> str:
    """A planted race."""
    return re.sub(r"^\s*bar(rier)?\.(cta\.)?sync.*$", "", ptx, flags=re.M)


def stray_store(ptx: str) -> str:
    """A planted access outside: the first store of the kernel goes 1 GiB too far."""
    return re.sub(r"(st\.global\S*\s+\[%\w+)\]", r"\1+1073741824]", ptx, count=1)


FAULTS = {"no_barriers": no_barriers, "stray_store": stray_store}
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:errors?|hazards?)")


def sanitize(folder: Path) -> dict[str, int | str]:
    """Errors that compute-sanitizer finds: none in the kernels, some where a fault is planted."""
    runs = {
        "memcheck": ("memcheck", "none"),
        "racecheck": ("racecheck", "none"),
        "memcheck of a planted access outside": ("memcheck", "stray_store"),
        "racecheck of planted missing barriers": ("racecheck", "no_barriers"),
    }
    # Each tensor gets an allocation of its own, so that an access outside of it is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found: dict[str, int | str] = {}
    for name, (tool, fault) in runs.items():
        command = [sys.executable, "-m", "benchmarks.nvidia.verify", str(folder), fault]
        result = subprocess.run(
            ["compute-sanitizer", "--tool", tool, *command], capture_output=True, text=True, env=environment
        )
        text = result.stdout + result.stderr
        summary = SUMMARY.search(text)
        # A process that ended early would have no errors to show.
        whole = fault != "none" or result.returncode == 0
        found[name] = int(summary[1]) if summary and whole else text[-500:]
    return found


def main(folder: str, fault: str = "none") -> None:
    """What compute-sanitizer watches: the small cases, in buffers without margins."""
    cases = all_cases()
    if fault != "none":
        named = {
            "stray_store": "write-float32-7x2x12-",
            "no_barriers": "quantize-float32-int8_per_token_head-11x3x64-",
        }[fault]
        cases = [case for case in cases if case.name.startswith(named)]
    report = run_cases(Translated(Path(folder), FAULTS.get(fault)), cases, margin=0)
    print(json.dumps(report))
    raise SystemExit(report["wrong"] > 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
