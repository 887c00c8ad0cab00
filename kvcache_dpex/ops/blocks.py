"""copy_blocks, swap_blocks, zero_blocks and gather_blocks: moves by the ids of a block manager."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from ..runtime.launch import arrays, launch
from .moves import SOURCES, move_blocks
from .pools import Caches, Pool, require_alike, steps_of


def copy_blocks(caches: Caches, pairs: Any) -> None:
    """Copy blocks within a pool, in all of its arrays, in place.

    The copies happen one after the other: with pairs (0, 1) and (1, 2), block 2 becomes block 0 as well.
    Pairs that do not depend on one another share launches of up to eight arrays.

    Parameters
    ----------
    caches
        The arrays of the pool, ``[num_blocks, ...]``, or groups of them such as the (kq, vq, ks, vs) of each
        layer. Scales of shape ``[num_blocks * block_size, num_kv_heads]`` go with their codes.
    pairs : [num_pairs, 2]
        Block ids (source, target): pairs of integers, or an array, which is read back and so waited for.
        A block that is copied to itself stays as it is.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or queue does not fit, or two of the arrays share memory; nothing is then written.
    IndexError
        The pool has no such block; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> layers = [kv.empty_quant_cache(4, 16, 8, 128) for _ in range(2)]
    >>> layers[1][0][0] = 5
    >>> kv.copy_blocks(layers, [(0, 3)])
    >>> int(layers[1][0][3, 0, 0, 0])
    5
    """
    copy(move_blocks, caches, pairs)


def swap_blocks(sources: Caches, targets: Caches, pairs: Any) -> None:
    """Copy blocks of one pool to another one, such as a pool in host memory, in place.

    Parameters
    ----------
    sources, targets
        As the caches of `copy_blocks`, on one queue; the pools may differ in the number of their blocks. A
        pool in host memory is ``kvcache_dpex.empty_cache(..., usm_type="host")``, which a GPU reads and
        writes itself: the host is not blocked. Tensors may also be on an XPU and on the CPU, best in pinned
        memory; torch's own copies then move them.
    pairs : [num_pairs, 2]
        Block ids (source, target). Where a target repeats, the last pair holds.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `copy_blocks` does; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> device = kv.empty_cache(4, 16, 8, 128)
    >>> host = kv.empty_cache(2, 16, 8, 128, usm_type="host")
    >>> device[0][3] = 1
    >>> kv.swap_blocks(device, host, [(3, 0)])
    >>> float(host[0][0].sum())
    16384.0
    """
    swap(move_blocks, sources, targets, pairs)


def zero_blocks(caches: Caches, block_ids: Any) -> None:
    """Fill blocks with zeros, in all arrays of a pool, in place.

    Attention multiplies what it masks, so the NaN of a block's former owner would survive in a fresh one.

    Parameters
    ----------
    caches
        As for `copy_blocks`.
    block_ids : [num_ids]
        Integers, or an array, which is read back and so waited for.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `copy_blocks` does; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> caches = kv.empty_cache(4, 16, 8, 128)
    >>> caches[0][:] = 1
    >>> kv.zero_blocks(caches, [0, 2])
    >>> float(caches[0].sum())
    32768.0
    """
    zero(move_blocks, caches, block_ids)


def gather_blocks(cache: Any, blocks: Any, *, out: Any = None) -> Any:
    """The blocks that a table lists as one contiguous array, bit for bit.

    `dequant_cache` with `blocks` decodes on the way.

    Parameters
    ----------
    cache : [num_blocks, ...]
        Of any dtype of 1, 2, 4 or 8 bytes and any strides.
    blocks : [...], int32 or int64
        Block ids, such as a block table. One that is negative or names no block gives zeros.
    out : [*blocks.shape, ...]
        Takes the result, changed in place; by default a new array.

    Returns
    -------
    array : [*blocks.shape, *cache.shape[1:]]
        Result block ``n`` is block ``blocks[n]``.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or queue does not fit; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> key_cache, _ = kv.empty_cache(4, 16, 8, 128)
    >>> key_cache[2] = 1
    >>> rows = kv.gather_blocks(key_cache, dpnp.asarray([[2, -1]], sycl_queue=key_cache.sycl_queue))
    >>> rows.shape, float(rows.sum())
    ((1, 2, 16, 8, 128), 16384.0)
    """
    return gather(move_blocks, cache, blocks, out)


def copy(move: Callable[..., None], caches: Caches, pairs: Any) -> None:
    """`copy_blocks` by a function that moves as `move_blocks` does."""
    launch.refuse_after_fork()
    pool = Pool("caches", caches)
    ids = pool.ids("pairs", pairs, 2)
    pool.require_ids("pairs", ids[:, 0])
    pool.require_ids("pairs", ids[:, 1])
    for sources, targets in steps_of(ids.tolist()):
        _move(move, pool, pool, sources, targets)


def swap(
    move: Callable[..., None],
    sources: Caches,
    targets: Caches,
    pairs: Any,
    across: Callable[[Pool, Pool, list[int], list[int]], None] | None = None,
) -> None:
    """`swap_blocks` by a function that moves as `move_blocks` does, and another one between two devices."""
    launch.refuse_after_fork()
    source, target = Pool("sources", sources), Pool("targets", targets)
    on_one = source.queue == target.queue
    require_alike(source.key, target.key, one_queue=across is None)
    ids = source.ids("pairs", pairs, 2)
    source.require_ids("pairs", ids[:, 0])
    target.require_ids("pairs", ids[:, 1])
    last = {to: at for at, to in ids.tolist()}
    if across is None or on_one:
        _move(move, source, target, list(last.values()), list(last))
    else:
        across(source, target, list(last.values()), list(last))


def zero(move: Callable[..., None], caches: Caches, block_ids: Any) -> None:
    """`zero_blocks` by a function that moves as `move_blocks` does."""
    launch.refuse_after_fork()
    pool = Pool("caches", caches)
    ids = pool.ids("block_ids", block_ids, 1)
    pool.require_ids("block_ids", ids)
    targets = list(dict.fromkeys(ids.tolist()))
    _move(move, None, pool, [-1] * len(targets), targets)


def gather(move: Callable[..., None], cache: Any, blocks: Any, out: Any) -> Any:
    """`gather_blocks` by a function that moves as `move_blocks` does."""
    launch.refuse_after_fork()
    shape = (*blocks.shape, *cache.shape[1:])
    if out is None:
        out = arrays.empty_like(cache, shape, cache.dtype)
    elif tuple(out.shape) != shape or out.dtype != cache.dtype:
        raise ValueError(
            f"`out` must be {cache.dtype} of shape {list(shape)}, got {out.dtype} of {list(out.shape)}"
        )
    move(blocks, out, source_0=cache)
    return out


def _move(
    move: Callable[..., None],
    sources: Pool | None,
    targets: Pool,
    source_ids: list[int],
    target_ids: list[int],
) -> None:
    """Move blocks between the arrays of two pools, in as few launches as they take."""
    if not source_ids:
        return
    first = next(iter(targets.arrays.values()))
    ids = arrays.of_host(first, np.array([source_ids, target_ids], np.int64))
    partner = dict(zip(targets.arrays, sources.arrays.values())) if sources else {}
    for names in targets.known.groups:
        given = {f"target_{at}": targets.arrays[name] for at, name in enumerate(names)}
        if sources:
            given.update((SOURCES[at], partner[name]) for at, name in enumerate(names))
        move(
            source_ids=ids[0],
            target_ids=ids[1],
            **given,
            num_sources=sources.num_blocks if sources else None,
            num_targets=targets.num_blocks,
        )
