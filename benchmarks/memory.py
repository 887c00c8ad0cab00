"""Memory: no growth over many calls, and how much the caches themselves take.

    python -m benchmarks memory

Ends with 1 where the process grew by more than a byte a call in the second half of the calls: allocators
take some pages for good in the first.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any, Callable

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvcache_dpex as kv

from .measure import conditions
from .presets import Case
from .work import Absent, Work, queue_for

WARMUP = 2000
COMPARED = ("float32", "float16")
ALLOWED = 1.0  # bytes a call: the least that Python allocates is 16


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--device", help="a dpctl filter string; default: the best device")
    parser.add_argument("--calls", type=int, default=100_000, help="of each operation; default: %(default)s")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    queue = queue_for(options.device)
    console.print(", ".join(f"{name} {value}" for name, value in conditions(queue).items()), highlight=False)
    console.print(_residency(queue))
    growth = Table("operation", "calls", "RSS before, MiB", "halfway", "after", "peak", "bytes a call")
    grown = False
    for name, call in _operations(queue).items():
        before, halfway, after, peak = _follow(call, options.calls, name, console, queue)
        each = 2 * (after - halfway) / options.calls
        grown |= each > ALLOWED
        figures = (f"{size / 2**20:.2f}" for size in (before, halfway, after, peak))
        growth.add_row(name, f"{options.calls}", *figures, f"{each:.3f}")
    console.print(growth)
    return int(grown)


def _operations(queue: Any) -> dict[str, Callable[[], Any]]:
    """Calls on new arrays each time, as a model makes them, into the same caches."""
    a, b = Work(Case("write", 8), queue).arrays, Work(Case("int8", 8), queue).arrays
    c = Work(Case("dequantize", 64), queue).arrays
    calls = {
        "reshape_and_cache": lambda: kv.reshape_and_cache(
            **{**a, "key": a["key"][:], "value": a["value"][:]}
        ),
        "reshape_and_cache_quant": lambda: kv.reshape_and_cache_quant(**{**b, "key": b["key"][:]}),
        "dequant_cache": lambda: kv.dequant_cache(c["q"], c["scales"]),
    }
    try:
        tensors = Work(Case("write", 8), queue).tensors
    except Absent:
        return calls
    import kvcache_dpex.torch as operations

    calls["reshape_and_cache on tensors"] = lambda: operations.reshape_and_cache(
        **{**tensors, "key": tensors["key"][:], "value": tensors["value"][:]}
    )
    return calls


def _follow(
    call: Callable[[], Any], calls: int, name: str, console: Console, queue: Any
) -> tuple[int, int, int, int]:
    """Resident bytes before, after half of the calls, after all of them, and at most."""
    for _ in range(WARMUP):
        call()
    queue.wait()
    seen = [resident()]
    for _ in track(range(100), description=name, console=console, transient=True):
        for _ in range(calls // 100):
            call()
        queue.wait()
        seen.append(resident())
    return seen[0], seen[50], seen[-1], max(seen)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _residency(queue: Any) -> Table:
    """Bytes of key and value caches of 4096 slots, 8 heads, 128."""
    sizes = (256, 16, 8, 128)
    table = Table(
        "caches of 4096 slots, 8 x 128",
        "MiB allocated",
        "MiB resident",
        *(f"of {dtype}" for dtype in COMPARED),
    )
    kept = []
    for name in (*COMPARED, "bfloat16", "float8_e4m3fn", "int8 codes and scales"):
        before = resident()
        if name.startswith("int8"):
            caches = kv.empty_quant_cache(*sizes, device=queue)
        else:
            caches = kv.empty_cache(*sizes, dtype=name, device=queue)
        queue.wait()
        kept.append(caches)
        taken = f"{(resident() - before) / 2**20:.2f}" if queue.sycl_device.is_cpu else "on the device"
        allocated = sum(array.nbytes for array in caches)
        parts = (allocated / (2 * math.prod(sizes) * np.dtype(dtype).itemsize) for dtype in COMPARED)
        table.add_row(name, f"{allocated / 2**20:.2f}", taken, *(f"{part:.3f}" for part in parts))
    return table


if __name__ == "__main__":
    sys.exit(main())
