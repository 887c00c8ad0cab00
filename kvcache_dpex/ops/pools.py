"""The arrays that make up a pool of blocks, checked together, and the order of copies among its blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..runtime.launch import arrays, launch
from ..runtime.launch.arrays import Operand
from . import validate
from .block_axes import blocks_of
from .moves import MOST
from .overlap import Guard

Caches = Iterable[Any]
"""Arrays, or groups of arrays such as the (kq, vq, ks, vs) of each layer."""


class Pool:
    """The arrays of a pool, and what is known of pools of such arrays."""

    def __init__(self, name: str, caches: Caches) -> None:
        launch.refuse_after_fork()
        self.name = name
        self.arrays = dict(_flat(name, caches))
        if not self.arrays:
            raise ValueError(f"`{name}` must hold at least one array, got none")
        read = tuple(arrays.read_output(array, each) for each, array in self.arrays.items())
        self.key = tuple(self.arrays), read
        self.known = _known(*self.key)
        self.num_blocks = self.known.num_blocks
        self.queue = next(iter(self.known.operands.values())).queue

    def ids(self, name: str, given: Any, axes: int) -> np.ndarray:
        """Block ids on the host, ``[n, 2]`` or ``[n]``."""
        on_device = arrays.is_tensor(given) or hasattr(type(given), "__sycl_usm_array_interface__")
        host = arrays.to_numpy(given) if on_device else np.asarray(given)
        wanted = "[num_pairs, 2]" if axes == 2 else "[num_ids]"
        if host.size == 0:
            host = np.empty((0, 2)[:axes], np.int64)
        if host.dtype.kind not in "iu":
            raise TypeError(f"`{name}` must hold integers, got {host.dtype}")
        if host.ndim != axes or host.shape[1:] != (2,)[: axes - 1]:
            raise ValueError(f"`{name}` must have shape {wanted}, got {list(host.shape)}")
        return host

    def require_ids(self, name: str, ids: np.ndarray) -> None:
        """Raise IndexError where the pool has no such block."""
        outside = np.flatnonzero((ids < 0) | (ids >= self.num_blocks))
        if outside.size:
            at = outside[0]
            raise IndexError(
                f"`{name}[{at}]` must name one of the {self.num_blocks} blocks of `{self.name}`, "
                f"got {ids[at]}"
            )


class Known(NamedTuple):
    """What a pool's arrays are, whatever they hold."""

    operands: dict[str, Operand]  # each as blocks
    num_blocks: int
    groups: list[list[str]]  # arrays of one dtype and shape of blocks, at most as many as a launch takes


@functools.lru_cache(maxsize=16)
def _known(names: tuple[str, ...], read: tuple[tuple[int, tuple], ...]) -> Known:
    """Check the arrays of a pool together, and group them."""
    addresses, fields = zip(*read)
    operands = dict(zip(names, (Operand(*each) for each in fields)))
    validate.same_queue(**operands)
    num_blocks = _num_blocks(operands)
    for name, operand in operands.items():
        validate.distinct(name, operand)
        if operand.itemsize not in (1, 2, 4, 8):
            raise TypeError(f"`{name}` must have a dtype of 1, 2, 4 or 8 bytes, got {operand.dtype_name}")
    Guard(names, ["written"] * len(names), list(operands.values()), ()).require_disjoint(addresses)
    operands = {name: blocks_of(name, operand, num_blocks) for name, operand in operands.items()}
    alike: dict[tuple, list[str]] = {}
    for name, operand in operands.items():
        alike.setdefault((operand.dtype, operand.shape), []).append(name)
    groups = [each[at : at + MOST] for each in alike.values() for at in range(0, len(each), MOST)]
    return Known(operands, num_blocks, groups)


def _num_blocks(operands: dict[str, Operand]) -> int:
    """The first axis of the caches; that of two-dimensional scales counts slots."""
    counts = {name: each.shape[0] for name, each in operands.items() if len(each.shape) > 2}
    if not counts:
        raise ValueError(
            f"`{next(iter(operands))}` must have shape [num_blocks, block_size, ...], or another array of "
            f"the pool must, got {[list(each.shape) for each in operands.values()]}"
        )
    (first, num_blocks), *others = counts.items()
    for name, count in others:
        if count != num_blocks:
            raise ValueError(f"`{name}` must have the {num_blocks} blocks of `{first}`, got {count}")
    return num_blocks


def _flat(name: str, caches: Caches) -> Iterator[tuple[str, Any]]:
    """Each array with what it is called in errors."""
    for number, each in enumerate(caches):
        if isinstance(each, (tuple, list)):
            yield from _flat(f"{name}[{number}]", each)
        else:
            yield f"{name}[{number}]", each


Key = tuple[tuple[str, ...], tuple[tuple[int, tuple], ...]]


@functools.lru_cache(maxsize=16)
def require_alike(sources: Key, targets: Key, one_queue: bool) -> None:
    """Two pools, by their keys: the same arrays, apart from one another."""
    known, other = _known(*sources), _known(*targets)
    if len(known.operands) != len(other.operands):
        raise ValueError(
            f"`targets` must hold an array for each of the {len(known.operands)} of `sources`, got "
            f"{len(other.operands)}"
        )
    for (name, source), (own_name, target) in zip(known.operands.items(), other.operands.items()):
        if one_queue:
            validate.same_queue(**{name: source, own_name: target})
        if source.dtype != target.dtype:
            raise TypeError(
                f"`{own_name}` must have the dtype of `{name}`, {source.dtype_name}, got {target.dtype_name}"
            )
        if source.shape[1:] != target.shape[1:]:
            raise ValueError(
                f"`{own_name}` must have the blocks of `{name}`, {list(source.shape[1:])}, got "
                f"{list(target.shape[1:])}"
            )
    (names, read), (own_names, own_read) = sources, targets
    kinds = ["written"] * len(own_names) + ["read"] * len(names)
    operands = [*other.operands.values(), *known.operands.values()]
    addresses = [address for address, _ in (*own_read, *read)]
    Guard([*own_names, *names], kinds, operands, ()).require_disjoint(addresses)


def steps_of(pairs: Iterable[Sequence[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Sources and targets of copies that may happen at once, step by step.

    A step ends before a pair that reads or writes what the step has written, or writes what it reads.

    >>> list(steps_of([(0, 1), (3, 4), (1, 2), (5, 5)]))
    [([0, 3], [1, 4]), ([1], [2])]
    """
    sources: list[int] = []
    targets: dict[int, None] = {}
    read: set[int] = set()
    for at, to in pairs:
        if at == to:
            continue
        if at in targets or to in targets or to in read:
            yield sources, list(targets)
            sources, targets, read = [], {}, set()
        sources.append(at)
        targets[to] = None
        read.add(at)
    if sources:
        yield sources, list(targets)
