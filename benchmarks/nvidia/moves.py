"""Blocks copied in every layer of a cache: ``python -m benchmarks.nvidia.moves FOLDER --output FILE``.

32 layers of keys and values, 64 pairs of blocks of 16 tokens, 8 heads of 128, beside torch's copy of as many
contiguous bytes. The folder is what `translate` wrote. Prints how many values differ from torch's caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, Callable

import torch

import kvcache_dpex
from tests.gates.standin import Device, Queue, launches_through

from .cuda import Translated
from .run import DTYPES, as_array, environment, microseconds

LAYERS, PAIRS, NUM_BLOCKS, AT_ONCE = 32, 64, 160, 8
SHAPE = 16, 8, 128


def measure(dtype: str, queue: Queue) -> dict[str, Any]:
    """One row: our time, and the others' over ours."""
    shape = 2 * LAYERS, NUM_BLOCKS, *SHAPE
    caches, twins = (torch.randn(shape, device="cuda").to(DTYPES[dtype]) for _ in range(2))
    twins.copy_(caches)
    at, to = torch.randperm(NUM_BLOCKS, device="cuda")[: 2 * PAIRS].view(2, PAIRS)
    ids = as_array(at.contiguous(), queue), as_array(to.contiguous(), queue)
    launches = []
    for first in range(0, 2 * LAYERS, AT_ONCE):
        arrays = [as_array(cache, queue) for cache in caches[first : first + AT_ONCE]]
        targets = {f"target_{number}": array for number, array in enumerate(arrays)}
        sources = {f"source_{number}": array for number, array in enumerate(arrays)}
        launches.append({**targets, **sources})

    def ours() -> None:
        for each in launches:
            kvcache_dpex.move_blocks(ids[0], target_ids=ids[1], **each)

    def indexed() -> None:
        for twin in twins:
            twin[to] = twin[at]

    size = PAIRS * caches[0, 0].nbytes * 2 * LAYERS
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ours(), indexed()
    torch.cuda.synchronize()
    different = int((caches != twins).sum())
    runs = {
        "ours": captured(ours),
        "copy": captured(lambda: target.copy_(source)),
        "torch": captured(indexed),
    }
    times = {name: statistics.median(each) for name, each in microseconds(runs, 1).items()}
    return {
        "work": "copy_blocks",
        "dtype": dtype,
        "mib": size >> 20,
        "launches": len(launches),
        "us": round(times["ours"], 1),
        "gb_per_s": round(2 * size / times["ours"] / 1e3, 1),
        "of_copy": round(times["copy"] / times["ours"], 3),
        "torch_over_ours": round(times["torch"] / times["ours"], 2),
        "different": different,
    }


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a graph of some launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what `translate` wrote")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    translated = Translated(options.folder)
    with launches_through(translated.launcher):
        rows = [measure(dtype, Queue(Device())) for dtype in DTYPES]
    options.output.write_text(json.dumps({**environment(translated), "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
