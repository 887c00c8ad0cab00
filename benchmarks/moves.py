"""Blocks of every layer copied within their caches, beside plain copies of the same bytes.

    python -m benchmarks moves

32 layers of keys and values, 64 pairs of blocks of 16 tokens, 8 heads of 128. A plain copy reads and writes
one array as large as all these blocks. All take turns; the caches are compared with torch's before times are
printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, Callable

from rich.console import Console
from rich.table import Table

from .measure import conditions
from .work import queue_for

LAYERS, PAIRS, NUM_BLOCKS = 32, 64, 160
SHAPE = 16, 8, 128
OURS, THEIRS = "copy_blocks", "torch, indexed"
FORMATS = ("float32", "bfloat16", "int8_per_token_head")


def contenders(format: str) -> tuple[dict[str, Callable[[], Any]], int]:
    """What copies, ours first, and how many bytes each copies."""
    import dpctl.memory
    import torch

    from kvcache_dpex import torch as kv

    layers = [_layer(torch, kv, format) for _ in range(LAYERS)]
    twins = [[tensor.clone() for tensor in layer] for layer in layers]
    at, to = torch.randperm(NUM_BLOCKS)[: 2 * PAIRS].view(2, PAIRS)
    pairs = torch.stack([at, to], 1).tolist()
    as_blocks = [tensor.view(NUM_BLOCKS, -1) for twin in twins for tensor in twin]
    size = sum(each[:PAIRS].nbytes for each in as_blocks)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    queue = queue_for("cpu")
    shared = [dpctl.memory.MemoryUSMDevice(size, queue=queue) for _ in range(2)]

    def indexed() -> None:
        for each in as_blocks:
            each[to] = each[at]

    def by_blocks() -> None:
        for each in as_blocks:
            for one, other in pairs:
                each[other].copy_(each[one])

    found: dict[str, Callable[[], Any]] = {
        OURS: lambda: kv.copy_blocks(layers, pairs),
        "plain copy, SYCL": lambda: queue.memcpy(shared[1], shared[0], size),
        "plain copy, torch": lambda: target.copy_(source),
        THEIRS: indexed,
        "torch, block by block": by_blocks,
    }
    found[OURS](), found[THEIRS]()
    if any(not torch.equal(a, b) for layer, twin in zip(layers, twins) for a, b in zip(layer, twin)):
        raise SystemExit(f"copy_blocks and torch leave different caches in {format}")
    return found, size


def _layer(torch: Any, kv: Any, format: str) -> list[Any]:
    """The tensors of a layer, filled with any bytes."""
    if format.endswith("_head"):
        layer = kv.empty_quant_cache(NUM_BLOCKS, *SHAPE, format=format, device="cpu")
    else:
        layer = kv.empty_cache(NUM_BLOCKS, *SHAPE, dtype=getattr(torch, format), device="cpu")
    for tensor in layer:
        tensor.copy_(torch.randint(-100, 100, tensor.shape))
    return list(layer)


def measured(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median of each, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> int:
    """Print a table: our time, and the others' times over ours."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks moves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = conditions(queue_for("cpu"))
    console.print(", ".join(f"{name} {value}" for name, value in found.items()), highlight=False)
    table = Table("format", "MiB", f"{OURS}, ms", "GB/s read and written")
    for format in FORMATS:
        runs, size = contenders(format)
        ours, *others = (times := measured(runs, options.rounds)).values()
        if len(table.columns) == 4:
            for name in list(times)[1:]:
                table.add_column(f"{name} / ours")
        speed = 2 * size / ours / 1e6
        ratios = [f"{other / ours:.2f}" for other in others]
        table.add_row(format, f"{size / 2**20:.0f}", f"{ours:.1f}", f"{speed:.1f}", *ratios)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
