"""Attention on a CPU device beside torch's: sequences x context, query heads / heads x head size.

    python -m benchmarks attention
    python -m benchmarks attention --shapes 1x16384 --dtypes int8

``gather + SDPA`` copies the blocks together and attends, as one does without this package; ``SDPA`` and
``SDPA folded`` have contiguous keys and values already, folded with the query heads of a group as tokens.
``read floor`` sums the bytes of the cache, which decoding must read at least. ``q512`` are prompts of so many
tokens. All take turns in blocks of calls, since torch's threads stay busy for a while after a call. Every
result is compared with that of SDPA in float64 before it is timed.
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
    num_tokens: int  # of a sequence's query, the last of its context
    num_q_heads: int
    num_kv_heads: int
    head_size: int

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads}x{self.head_size}"
        return f"{self.batch}, {heads}"

    @property
    def batch(self) -> str:
        """
        >>> Shape(1, 512, 512, 32, 8, 128).batch
        '1x512 q512'
        """
        return f"{self.num_seqs}x{self.context}" + (f" q{self.num_tokens}" if self.num_tokens > 1 else "")


SHAPES = [
    Shape(*batch, *heads)
    for heads in ((32, 8, 128), (9, 3, 64))
    for batch in ((1, 128, 1), (1, 1024, 1), (1, 16384, 1), (8, 4096, 1), (32, 1024, 1), (1, 512, 512))
]
BLOCK_SIZE = 16
DTYPES = ("float32", "bfloat16", "float16", "int8")


def contenders(shape: Shape, dtype: str) -> dict[str, Callable[[], Any]]:
    """What attends, by name; ours first."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from kvcache_dpex import torch as kv

    num_seqs, context, num_tokens, num_q_heads, num_kv_heads, head_size = shape
    query, caches, scales, table = inputs(shape, dtype)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32)
    starts = num_tokens * torch.arange(num_seqs + 1, dtype=torch.int32) if num_tokens > 1 else None
    named_scales = dict(zip(("key_scales", "value_scales"), scales))
    values = [kv.dequant_cache(*each) for each in zip(caches, scales)] if scales else caches

    def gathered() -> list[Any]:
        if scales:
            blocks = [kv.dequant_cache(*each, blocks=table) for each in zip(caches, scales)]
        else:
            blocks = [cache[table.long()] for cache in caches]
        return [each.flatten(1, 2)[:, :context].transpose(1, 2) for each in blocks]

    def attend(q: Any, k: Any, v: Any) -> Any:
        causal = num_tokens > 1
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    rows = query.view(num_seqs, num_tokens, num_q_heads, head_size).transpose(1, 2)
    contiguous = [each.contiguous() for each in gathered()]
    found: dict[str, Callable[[], Any]] = {
        "paged_attention": lambda: kv.paged_attention(
            *(query, *caches, table, lengths), query_start_loc=starts, **named_scales
        ),
        "gather + SDPA": lambda: attend(rows, *gathered()).transpose(1, 2),
        "SDPA": lambda: attend(rows, *contiguous).transpose(1, 2),
    }
    if num_tokens == 1:
        folded = query.view(num_seqs, num_kv_heads, -1, head_size)
        found["SDPA folded"] = lambda: attend(folded, *contiguous)
    exact = attend(rows.double(), *(each.double() for each in contiguous)).transpose(1, 2)
    for name, run in found.items():
        error = (run().reshape(exact.shape).double() - exact).abs().max().item()
        if not error < (1e-4 if values[0].dtype == torch.float32 else 2e-2):
            raise SystemExit(f"{name} is wrong by {error} for {shape}, {dtype}")
    words = [cache.view(torch.int64) for cache in caches]
    return {**found, "read floor": lambda: [each.sum() for each in words]} if num_tokens == 1 else found


def inputs(shape: Shape, dtype: str) -> tuple[Any, list[Any], list[Any], Any]:
    """Query, caches, scales where there are codes, and block table."""
    import torch

    from kvcache_dpex import torch as kv

    generator = torch.Generator().manual_seed(0)
    num_seqs, context, num_tokens, num_q_heads, num_kv_heads, head_size = shape
    table = torch.randperm(num_seqs * -(-context // BLOCK_SIZE), generator=generator).view(num_seqs, -1).int()
    sizes = table.numel(), BLOCK_SIZE, num_kv_heads, head_size
    values = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    query = torch.randn(num_seqs * num_tokens, num_q_heads, head_size, generator=generator).to(values)
    caches = [torch.randn(*sizes, generator=generator).to(values) for _ in range(2)]
    if dtype != "int8":
        return query, caches, [], table
    kq, vq, ks, vs = kv.empty_quant_cache(*sizes, device="cpu")
    rows = [cache.flatten(0, 1) for cache in caches]
    kv.reshape_and_cache_quant(*rows, kq, vq, ks, vs, torch.arange(table.numel() * BLOCK_SIZE))
    return query, [kq, vq], [ks, vs], table


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="such as 1x1024; default: all")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="default: all")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case; default: %(default)s")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    found = conditions(queue_for("cpu"))
    console.print(", ".join(f"{name} {value}" for name, value in found.items()), highlight=False)
    names = ["gather + SDPA", "SDPA", "SDPA folded", "read floor"]
    table = Table("case", "dtype", "paged_attention, us", *(f"{name} / ours" for name in names))
    for shape in SHAPES:
        for dtype in options.dtypes if shape.batch in (options.shapes or [shape.batch]) else ():
            times = measured(contenders(shape, dtype), options.seconds)
            ours = times["paged_attention"]
            ratios = [f"{times[name] / ours:.2f}" if name in times else "" for name in names]
            table.add_row(str(shape), dtype, f"{ours:.0f}", *ratios)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
