"""Decoding attention on a CPU device beside torch's: sequences x context, query heads / heads x head size.

    python -m benchmarks.attention

``gather + SDPA`` copies the blocks together and attends, as one does without this package; ``SDPA`` and
``SDPA folded`` have contiguous keys and values already, folded with the query heads of a group as tokens. All
take turns in blocks of calls, since torch's threads stay busy for a while after a call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, Callable, NamedTuple

from rich.console import Console
from rich.table import Table

from .measure import conditions
from .work import queue_for


class Shape(NamedTuple):
    """A batch of sequences of one length, and a model's heads."""

    num_seqs: int
    context: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int

    def __str__(self) -> str:
        return f"{self.num_seqs}x{self.context}, {self.num_q_heads}/{self.num_kv_heads}x{self.head_size}"


SHAPES = [
    Shape(*batch, *heads)
    for heads in ((32, 8, 128), (9, 3, 64))
    for batch in ((1, 128), (1, 1024), (8, 1024))
]
BLOCK_SIZE = 16
DTYPES = ("float32", "bfloat16", "float16", "int8")


def contenders(shape: Shape, dtype: str) -> dict[str, Callable[[], Any]]:
    """What attends, by name; ours first. Every result is compared with that of SDPA in float64."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from kvcache_dpex import torch as kv

    generator = torch.Generator().manual_seed(0)
    num_seqs, context, num_q_heads, num_kv_heads, head_size = shape
    table = torch.randperm(num_seqs * -(-context // BLOCK_SIZE), generator=generator).view(num_seqs, -1)
    sizes = table.numel(), BLOCK_SIZE, num_kv_heads, head_size
    values = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    query = torch.randn(num_seqs, num_q_heads, head_size, generator=generator).to(values)
    caches = [torch.randn(*sizes, generator=generator).to(values) for _ in range(2)]
    arguments, scales = [query, *caches], {}
    if dtype == "int8":
        kq, vq, ks, vs = kv.empty_quant_cache(*sizes, device="cpu")
        rows = [cache.flatten(0, 1) for cache in caches]
        kv.reshape_and_cache_quant(*rows, kq, vq, ks, vs, torch.arange(table.numel() * BLOCK_SIZE))
        arguments, scales = [query, kq, vq], {"key_scales": ks, "value_scales": vs}
        caches = [kv.dequant_cache(kq, ks), kv.dequant_cache(vq, vs)]
    arguments += [table.int(), torch.full((num_seqs,), context, dtype=torch.int32)]

    def gathered() -> list[Any]:
        if dtype == "int8":
            blocks = [
                kv.dequant_cache(q, s, blocks=arguments[3]) for q, s in zip(arguments[1:3], scales.values())
            ]
        else:
            blocks = [cache[table] for cache in caches]
        return [each.flatten(1, 2)[:, :context].transpose(1, 2) for each in blocks]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    one, folded = query.unsqueeze(2), query.view(num_seqs, num_kv_heads, -1, head_size)
    contiguous = [each.contiguous() for each in gathered()]
    exact = attend(one.double(), *(each.double() for each in contiguous)).squeeze(2)
    found: dict[str, Callable[[], Any]] = {
        "paged_attention": lambda: kv.paged_attention(*arguments, **scales),
        "gather + SDPA": lambda: attend(one, *gathered()),
        "SDPA": lambda: attend(one, *contiguous),
        "SDPA folded": lambda: attend(folded, *contiguous),
    }
    for name, run in found.items():
        error = (run().reshape(exact.shape).double() - exact).abs().max().item()
        if not error < (1e-4 if values is torch.float32 else 2e-2):
            raise SystemExit(f"{name} is wrong by {error} for {shape}, {dtype}")
    return found


def measured(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The median of each, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in runs.items():
            run()
            for _ in range(5):
                start = time.perf_counter()
                run()
                times[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> int:
    """Print a table: our time, and the others' times over ours."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case; default: %(default)s")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = conditions(queue_for("cpu"))
    console.print(", ".join(f"{name} {value}" for name, value in found.items()), highlight=False)
    table = Table("case", "dtype", "paged_attention, us")
    for shape in SHAPES:
        for dtype in DTYPES:
            ours, *others = (times := measured(contenders(shape, dtype), options.seconds)).values()
            if len(table.columns) == 3:
                for name in list(times)[1:]:
                    table.add_column(f"{name} / ours")
            table.add_row(str(shape), dtype, f"{ours:.0f}", *(f"{other / ours:.2f}" for other in others))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
