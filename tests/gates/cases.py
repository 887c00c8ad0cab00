"""Small calls of the public operations that are hard on a kernel, each with its oracle."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import kvcache_dpex
from kvcache_dpex import reference

SENTINEL = 0xA5


class Case(NamedTuple):
    """One call: arguments are NumPy views, whose whole buffers are compared afterwards."""

    name: str
    operation: str
    arguments: tuple[np.ndarray, ...]
    keywords: dict[str, Any] = {}

    def __repr__(self) -> str:
        return self.name

    @property
    def function(self) -> Any:
        return getattr(kvcache_dpex, self.operation)

    def buffers(self) -> list[np.ndarray]:
        """The memory that the arguments look at, each buffer once."""
        found = {id(buffer): buffer for buffer in map(owner, self.arguments)}
        return list(found.values())

    def expected(self) -> list[np.ndarray]:
        """What the oracle makes of the buffers."""
        copies = {id(buffer): buffer.copy() for buffer in self.buffers()}
        views = (rebase(view, copies[id(owner(view))]) for view in self.arguments)
        with np.errstate(all="ignore"):
            getattr(reference, self.operation)(*views, **self.keywords)
        return list(copies.values())


def owner(view: np.ndarray) -> np.ndarray:
    """The array that owns a view's memory."""
    while view.base is not None:
        view = view.base
    return view


def start(view: np.ndarray) -> int:
    """Bytes from the start of the view's memory to its first element."""
    return view.ctypes.data - owner(view).ctypes.data


def rebase(view: np.ndarray, buffer: np.ndarray) -> np.ndarray:
    """The same view of another buffer."""
    return np.ndarray(view.shape, view.dtype, buffer.data, start(view), view.strides)


def filled(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator | None = None) -> np.ndarray:
    """A buffer of sentinel bytes, or of random bits."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    content = np.full(size, SENTINEL, np.uint8) if rng is None else rng.integers(0, 256, size, np.uint8)
    buffer = np.empty(shape, dtype)
    buffer.view(np.uint8).reshape(-1)[:] = content
    return buffer


def hostile_slots(num_tokens: int, num_slots: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Different slots, the first and the last among them, between every kind of slot to be skipped."""
    slots = rng.permutation(num_slots)[:num_tokens].astype(dtype)
    good = [0, num_slots - 1]
    slots = np.array([*good, *(slot for slot in slots if slot not in good)], dtype)[:num_tokens]
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    bad = [-1, num_slots, least, most, num_slots + 1]
    for index, slot in zip(range(2, num_tokens, 2), bad):
        slots[index] = slot
    return slots


def write_cases() -> list[Case]:
    """Calls of `reshape_and_cache`: every word size, slot type and layout of the caches."""
    rng = np.random.default_rng(5)
    found = []
    for slot in ("int32", "int64"):
        found += [
            _write(rng, f"contiguous-{slot}", "float32", 7, 2, (12, 12), slot),
            _write(rng, f"one-unit-{slot}", "uint8", 3, 1, (16, 16), slot),
            _write(rng, f"many-units-{slot}", "float16", 2, 3, (96, 96), slot),
        ]
        for dtype in ("uint8", "uint16", "uint32", "uint64"):
            found += [
                _write(rng, f"odd-{dtype}-{slot}", dtype, 5, 3, (5, 3), slot, "fused"),
                _write(rng, f"packed-{dtype}-{slot}", dtype, 3, 2, (3, 3), slot, "packed"),
                _write(rng, f"interleaved-{dtype}-{slot}", dtype, 3, 1, (7, 7), slot, "interleaved"),
            ]
    return found


def _write(rng, name, dtype, tokens, heads, sizes, slot, layout="contiguous", blocks=3, block_size=4) -> Case:
    key_size, value_size = sizes
    if layout == "fused":
        fused = filled((tokens, heads, key_size + value_size), dtype, rng)
        key, value = fused[..., :key_size], fused[..., key_size:]
    else:
        key = filled((tokens, heads, key_size), dtype, rng)
        value = filled((tokens, heads, value_size), dtype, rng)
    if layout == "packed":
        both = filled((blocks, block_size, heads, key_size + value_size), dtype)
        caches = both[..., :key_size], both[..., key_size:]
    elif layout == "interleaved":
        both = filled((blocks, 2, block_size, heads, key_size), dtype)
        caches = both[:, 0], both[:, 1]
    else:
        caches = tuple(filled((blocks, block_size, heads, size), dtype) for size in sizes)
    slots = hostile_slots(tokens, blocks * block_size, slot, rng)
    if layout == "packed":
        slots = np.stack([slots, slots + 1], axis=1)[:, 0]
    return Case(f"write-{name}", "reshape_and_cache", (key, value, *caches, slots))


def all_cases() -> list[Case]:
    return write_cases()
