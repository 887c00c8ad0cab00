"""Small calls of the public operations that are hard on a kernel, each with its oracle."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np

import kvcache_dpex
from kvcache_dpex import reference

SENTINEL = 0xA5
SLOT_TYPES = ("int32", "int64")
VALUE_TYPES = ("float32", "float16", "bfloat16")
# Outputs whose NaN may come with any payload.
COMPUTED = {"reshape_and_cache_quant": ("ks", "vs"), "dequant_cache": ("out",)}


class Case(NamedTuple):
    """One call: arguments are NumPy views, whose whole buffers are compared afterwards."""

    name: str
    operation: str
    arguments: dict[str, np.ndarray]
    options: dict[str, Any]

    def __repr__(self) -> str:
        return self.name

    def call(self, arrays: dict[str, Any]) -> None:
        """The package's operation on arrays of a device."""
        getattr(kvcache_dpex, self.operation)(**arrays, **self.options)

    def copy(self) -> Case:
        """The same call on buffers of its own."""
        buffers = {id(buffer): buffer.copy() for buffer in map(owner, self.arguments.values())}
        views = {name: rebase(view, buffers[id(owner(view))]) for name, view in self.arguments.items()}
        return self._replace(arguments=views)

    def expected(self) -> Case:
        """A copy, after the oracle's operation."""
        after = self.copy()
        function = getattr(reference, self.operation)
        taken = inspect.signature(function).parameters
        given = {**after.arguments, **after.options}
        result = function(**{name: value for name, value in given.items() if name in taken})
        if result is not None:
            after.arguments["out"][...] = result
        return after


def compare(actual: Case, expected: Case) -> list[str]:
    """Which arguments' buffers differ, gaps included, in any byte but those that say which NaN it is."""
    found = []
    for case in (actual, expected):
        for name in COMPUTED.get(case.operation, ()):
            _one_nan(case.arguments[name], case.options.get("dtype"))
    for name, view in actual.arguments.items():
        ours, oracles = (owner(v).reshape(-1).view(np.uint8) for v in (view, expected.arguments[name]))
        count = int((ours != oracles).sum())
        if count:
            found.append(f"{count} of {ours.size} bytes behind `{name}` differ")
    return found


def _one_nan(view: np.ndarray, dtype: Any) -> None:
    if dtype == "bfloat16" and view.dtype == np.uint16:
        view[(view & 0x7FFF) > 0x7F80] = 0x7FC0
    else:
        view[np.isnan(view)] = np.nan


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
    return np.ndarray(view.shape, view.dtype, buffer, start(view), view.strides)


def filled(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator | None = None) -> np.ndarray:
    """A buffer of sentinel bytes, or of random bits."""
    buffer = np.empty(shape, dtype)
    content = buffer.reshape(-1).view(np.uint8)
    content[:] = SENTINEL if rng is None else rng.integers(0, 256, content.size, np.uint8)
    return buffer


def floats(shape: tuple[int, ...], value_type: str, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers, with rows of zeros, of one huge or tiny value, of infinity and of NaN among them."""
    values = rng.standard_normal(shape).astype(np.float32)
    rows = values.reshape(-1, shape[-1])
    for row, special in zip(range(1, len(rows), 2), (0.0, 1e-41, np.inf, np.nan, 3e38, -127.0)):
        rows[row, 1:] *= special if special == 0 else 1
        rows[row, 0] = special
    if value_type == "bfloat16":
        return reference.from_float32(values, "bfloat16")
    with np.errstate(over="ignore"):
        return values.astype(value_type)


def hostile_slots(num_tokens: int, num_slots: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Different slots, the first and the last among them, between every kind of slot to be skipped."""
    slots = rng.permutation(np.arange(1, num_slots - 1))[:num_tokens]
    slots = np.array([0, num_slots - 1, *slots], dtype)[:num_tokens]
    limits = np.iinfo(dtype)
    for index, slot in zip(range(2, num_tokens, 2), (-1, num_slots, limits.min, limits.max, num_slots + 1)):
        slots[index] = slot
    return slots


def rows_and_caches(
    rng: np.random.Generator,
    dtypes: tuple[str, str],
    tokens: int,
    heads: int,
    sizes: tuple[int, int],
    layout: str,
    blocks: int = 3,
    block_size: int = 4,
) -> list[np.ndarray]:
    """key, value and two caches: ``contiguous``, or as views of ``packed`` or ``interleaved`` buffers."""
    total, row_type, cache_type = sum(sizes), *dtypes
    make = floats if cache_type == "int8" and row_type != "int8" else None
    fused_shape = (tokens, heads, total)
    fused = make(fused_shape, row_type, rng) if make else filled(fused_shape, row_type, rng)
    key, value = fused[..., : sizes[0]], fused[..., sizes[0] :]
    if layout == "packed":
        both = filled((blocks, block_size, heads, total), cache_type)
        return [key, value, both[..., : sizes[0]], both[..., sizes[0] :]]
    if layout == "interleaved":
        both = filled((blocks, 2, block_size, heads, sizes[0]), cache_type)
        return [key.copy(), value.copy(), both[:, 0], both[:, 1]]
    caches = [filled((blocks, block_size, heads, size), cache_type) for size in sizes]
    return [key.copy(), value.copy(), *caches]


def write_cases() -> list[Case]:
    """`reshape_and_cache`: every word size, slot type and layout of the caches."""
    rng = np.random.default_rng(5)
    shapes = [("float32", 7, 2, (12, 12), "contiguous"), ("uint8", 3, 1, (16, 16), "contiguous")]
    shapes += [("float16", 2, 3, (96, 96), "contiguous")]
    for dtype in ("uint8", "uint16", "uint32", "uint64"):
        shapes += [(dtype, 5, 3, (5, 3), "contiguous"), (dtype, 3, 2, (3, 3), "packed")]
        shapes += [(dtype, 3, 1, (7, 7), "interleaved")]
    found = []
    for slot in SLOT_TYPES:
        for dtype, tokens, heads, sizes, layout in shapes:
            arrays = rows_and_caches(rng, (dtype, dtype), tokens, heads, sizes, layout)
            slots = hostile_slots(tokens, 12, slot, rng)
            if layout == "packed":
                slots = np.stack([slots, slots], axis=1)[:, 0]
            names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
            name = f"write-{dtype}-{sizes[0]}-{layout}-{slot}"
            found.append(Case(name, "reshape_and_cache", dict(zip(names, [*arrays, slots])), {}))
    return found


def quantize_cases() -> list[Case]:
    """`reshape_and_cache_quant`: whole fours and odd sizes, groups that are not full, special rows."""
    rng = np.random.default_rng(6)
    shapes = [(11, 3, (64, 64), "contiguous"), (2, 1, (16, 16), "interleaved"), (3, 2, (48, 48), "packed")]
    shapes += [(3, 2, (5, 3), "contiguous"), (2, 1, (1, 1), "packed")]
    found = []
    for value_type in VALUE_TYPES:
        row_type = "uint16" if value_type == "bfloat16" else value_type
        options = {"dtype": "bfloat16"} if value_type == "bfloat16" else {}
        for slot in SLOT_TYPES:
            for tokens, heads, sizes, layout in shapes:
                arrays = rows_and_caches(rng, (value_type, "int8"), tokens, heads, sizes, layout)
                assert arrays[0].dtype == row_type
                scales = [filled((12, heads), "float32") for _ in range(2)]
                slots = hostile_slots(tokens, 12, slot, rng)
                names = ("key", "value", "kq", "vq", "ks", "vs", "slot_mapping")
                name = f"quantize-{value_type}-{sizes[0]}-{layout}-{slot}"
                arguments = dict(zip(names, [*arrays, *scales, slots]))
                found.append(Case(name, "reshape_and_cache_quant", arguments, options))
    return found


def dequantize_cases() -> list[Case]:
    """`dequant_cache`: all blocks and chosen ones, wide rows and odd ones."""
    rng = np.random.default_rng(7)
    found = []
    for value_type in VALUE_TYPES:
        out_type = "uint16" if value_type == "bfloat16" else value_type
        options = {"dtype": "bfloat16"} if value_type == "bfloat16" else {}
        for size in (20, 3):
            q = rng.integers(-127, 128, (3, 2, 3, size), np.int8)
            scales = floats((6, 3), "float32", rng)
            for block_type in (None, *SLOT_TYPES):
                arguments = {"q": q, "scales": scales}
                if block_type:
                    arguments["blocks"] = np.array([2, -1, 0, 3, 2], block_type)
                blocks = 5 if block_type else 3
                arguments["out"] = filled((blocks, 2, 3, size), out_type)
                name = f"dequantize-{value_type}-{size}-{block_type or 'all'}"
                found.append(Case(name, "dequant_cache", arguments, options))
    return found


def all_cases() -> list[Case]:
    """Every small case; together they launch every packaged module."""
    return [*write_cases(), *quantize_cases(), *dequantize_cases()]
