"""Moves of blocks in torch tensors, by way of torch's dispatcher; `kvcache_dpex.torch` has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable, TypeVar

import torch  # noqa: F401  (for the examples)
from torch import Tensor

from . import dispatch
from .ops import blocks as on_arrays
from .ops.pools import Caches, Pool

_move_blocks = dispatch.registered.move_blocks.default
Function = TypeVar("Function", bound=Callable[..., Any])


def _documented(function: Function) -> Function:
    """Take the documentation of the function of this name on arrays, up to its examples."""
    whole = getattr(on_arrays, function.__name__).__doc__
    function.__doc__ = whole.partition("    Examples\n")[0] + "    Examples\n" + (function.__doc__ or "")
    function.__module__ = __name__.rpartition(".")[0] + ".torch"
    return function


@_documented
def copy_blocks(caches: Caches, pairs: Any) -> None:
    """--------
    >>> layers = [torch.arange(12.0).view(3, 4, 1, 1) for _ in range(2)]
    >>> copy_blocks(layers, [(0, 2)])
    >>> layers[1][2].flatten()
    tensor([0., 1., 2., 3.])
    """
    on_arrays.copy(_move_blocks, caches, pairs)


@_documented
def swap_blocks(sources: Caches, targets: Caches, pairs: Any) -> None:
    """--------
    >>> pool, other = torch.arange(12.0).view(3, 4, 1, 1), torch.zeros(1, 4, 1, 1)
    >>> swap_blocks([pool], [other], [(2, 0)])
    >>> other.flatten()
    tensor([ 8.,  9., 10., 11.])
    """
    on_arrays.swap(_move_blocks, sources, targets, pairs, across=_copy_across)


@_documented
def zero_blocks(caches: Caches, block_ids: Any) -> None:
    """--------
    >>> pool = torch.ones(3, 4, 1, 1)
    >>> zero_blocks([pool], [1])
    >>> pool.sum((1, 2, 3))
    tensor([4., 0., 4.])
    """
    on_arrays.zero(_move_blocks, caches, block_ids)


@_documented
def gather_blocks(cache: Tensor, blocks: Tensor, *, out: Tensor | None = None) -> Tensor:
    """--------
    >>> pool = torch.arange(12.0).view(3, 4, 1, 1)
    >>> gather_blocks(pool, torch.tensor([[2, -1]])).shape
    torch.Size([1, 2, 4, 1, 1])
    """
    return on_arrays.gather(_move_blocks, cache, blocks, out)


def _copy_across(sources: Pool, targets: Pool, source_ids: list[int], target_ids: list[int]) -> None:
    """Copy between an XPU and the host by torch's own copies, on its current stream.

    The host goes on at once where the memory of the host is pinned.
    """
    for source, target in zip(sources.arrays.values(), targets.arrays.values()):
        rows, found = (len(each) // pool.num_blocks for each, pool in ((source, sources), (target, targets)))
        assert rows == found
        for at, to, count in _runs(source_ids, target_ids):
            part = source[at * rows : (at + count) * rows]
            target[to * rows : (to + count) * rows].copy_(part, non_blocking=True)


def _runs(source_ids: Sequence[int], target_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring blocks that stay neighbours, as first source, first target and count.

    >>> list(_runs([4, 5, 9, 6], [0, 1, 2, 3]))
    [(4, 0, 2), (9, 2, 1), (6, 3, 1)]
    """
    first, count = None, 0
    for at, to in zip(source_ids, target_ids):
        if first and (at, to) == (first[0] + count, first[1] + count):
            count += 1
            continue
        if first:
            yield (*first, count)
        first, count = (at, to), 1
    if first:
        yield (*first, count)
