"""Small calls of the public operations that are hard on a kernel, each with its oracle."""

from __future__ import annotations

import inspect
import itertools
from typing import Any, NamedTuple

import numpy as np

import kvcache_dpex
from kvcache_dpex import reference

SENTINEL = 0xA5
BLOCK_SIZE = 4
SLOT_TYPES = ("int32", "int64")
VALUE_TYPES = ("float32", "float16", "bfloat16")
# The formats with codes, and what holds them.
CODES = {"int8_per_token_head": "int8", "fp8_per_token_head": "uint8"}
# Those with codes that are given scales, and what holds them.
STATIC = {"fp8_e4m3": "uint8", "fp8_e5m2": "uint8"}
# Outputs whose NaN may come with any payload.
COMPUTED = {"reshape_and_cache_quant": ("ks", "vs"), "dequant_cache": ("out",)}
# Outputs that are float32 sums, so that the oracle's float64 says how close they must be, not their bits: the
# values of the cases are of size 1.
CLOSE = {"paged_attention": ("out", "lse"), "merge_attention_states": ("out", "lse")}
TOLERANCE = {"float32": 4e-6, "float16": 2e-3, "uint16": 2e-2}


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
        if "others" not in taken:
            given = {name: value for name, value in given.items() if name in taken}
        with np.errstate(all="ignore"):
            if self.operation in CLOSE:
                exact = {name: np.zeros(self.arguments[name].shape) for name in CLOSE[self.operation]}
                results = function(**{**given, **{name: exact[name] for name in exact if name in taken}})
                for name, result in zip(exact, results):
                    kind = after.arguments[name].dtype.name
                    kind = "bfloat16" if kind == "uint16" else kind
                    after.arguments[name][...] = reference.from_float32(result.astype("f4"), kind)
            else:
                result = function(**given)
                if isinstance(result, tuple):
                    after.arguments["out"][...], after.arguments["positions"][...] = result
                elif result is not None:
                    after.arguments["out"][...] = result
        return after


def compare(actual: Case, expected: Case) -> list[str]:
    """Which arguments' buffers differ, gaps included, in any byte but those that say which NaN it is."""
    found = []
    for case in (actual, expected):
        for name in COMPUTED.get(case.operation, ()):
            _one_nan(case.arguments[name], case.options.get("dtype"))
    for name in CLOSE.get(actual.operation, ()):
        view, wanted = actual.arguments[name], expected.arguments[name]
        ours, oracles = (reference.as_float32(each, _held(each)).astype("f8") for each in (view, wanted))
        with np.errstate(invalid="ignore"):
            near = (ours == oracles) | (abs(ours - oracles) <= TOLERANCE[view.dtype.name])
        wanted[near] = view[near]
    for name, view in actual.arguments.items():
        ours, oracles = (owner(v).reshape(-1).view(np.uint8) for v in (view, expected.arguments[name]))
        count = int((ours != oracles).sum())
        if count:
            found.append(f"{count} of {ours.size} bytes behind `{name}` differ")
    return found


def _held(view: np.ndarray) -> str | None:
    return "bfloat16" if view.dtype == np.uint16 else None


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
    rows: Any,
    cache_type: str,
    tokens: int,
    heads: int,
    sizes: tuple[int, int],
    layout: str,
    blocks: int,
) -> list[np.ndarray]:
    """key, value and two caches: ``contiguous``, or as views of ``packed`` or ``interleaved`` buffers.

    `rows` makes an array of a shape.
    """
    total = sum(sizes)
    fused = rows((tokens, heads, total))
    key, value = fused[..., : sizes[0]], fused[..., sizes[0] :]
    if layout == "packed":
        both = filled((blocks, BLOCK_SIZE, heads, total), cache_type)
        return [key, value, both[..., : sizes[0]], both[..., sizes[0] :]]
    if layout == "interleaved":
        both = filled((blocks, 2, BLOCK_SIZE, heads, sizes[0]), cache_type)
        return [key.copy(), value.copy(), both[:, 0], both[:, 1]]
    caches = [filled((blocks, BLOCK_SIZE, heads, size), cache_type) for size in sizes]
    return [key.copy(), value.copy(), *caches]


def write_case(
    rng: np.random.Generator,
    dtype: str,
    tokens: int,
    heads: int,
    sizes: tuple[int, int],
    layout: str,
    slot: str,
    blocks: int = 3,
) -> Case:
    """A call of `reshape_and_cache` that moves random bits."""

    def rows(shape: tuple[int, ...]) -> np.ndarray:
        return filled(shape, dtype, rng)

    arrays = rows_and_caches(rows, dtype, tokens, heads, sizes, layout, blocks)
    slots = hostile_slots(tokens, blocks * BLOCK_SIZE, slot, rng)
    if layout == "packed":
        slots = np.stack([slots, slots], axis=1)[:, 0]
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    name = f"write-{dtype}-{tokens}x{heads}x{sizes[0]}-{layout}-{slot}"
    return Case(name, "reshape_and_cache", dict(zip(names, [*arrays, slots])), {})


def quantize_case(
    rng: np.random.Generator,
    value_type: str,
    tokens: int,
    heads: int,
    sizes: tuple[int, int],
    layout: str,
    slot: str,
    format: str,
    blocks: int = 3,
) -> Case:
    """A call of `reshape_and_cache_quant` on numbers with hard rows among them."""

    def rows(shape: tuple[int, ...]) -> np.ndarray:
        return floats(shape, value_type, rng)

    arrays = rows_and_caches(rows, CODES[format], tokens, heads, sizes, layout, blocks)
    scales = [filled((blocks * BLOCK_SIZE, heads), "float32") for _ in range(2)]
    slots = hostile_slots(tokens, blocks * BLOCK_SIZE, slot, rng)
    names = ("key", "value", "kq", "vq", "ks", "vs", "slot_mapping")
    name = f"quantize-{value_type}-{format}-{tokens}x{heads}x{sizes[0]}-{layout}-{slot}"
    arguments = dict(zip(names, [*arrays, *scales, slots]))
    return Case(name, "reshape_and_cache_quant", arguments, {**_meaning(value_type), "format": format})


def cast_case(
    rng: np.random.Generator,
    value_type: str,
    tokens: int,
    heads: int,
    sizes: tuple[int, int],
    layout: str,
    slot: str,
    format: str,
    blocks: int = 3,
) -> Case:
    """A call of `reshape_and_cache_fp8` with one scale for keys and one a head for values."""

    def rows(shape: tuple[int, ...]) -> np.ndarray:
        return floats(shape, value_type, rng)

    arrays = rows_and_caches(rows, STATIC[format], tokens, heads, sizes, layout, blocks)
    scales = np.array([0.3], "f4"), np.exp(rng.standard_normal(heads)).astype("f4")
    slots = hostile_slots(tokens, blocks * BLOCK_SIZE, slot, rng)
    names = ("key", "value", "key_cache", "value_cache", "k_scale", "v_scale", "slot_mapping")
    name = f"cast-{value_type}-{format}-{tokens}x{heads}x{sizes[0]}-{layout}-{slot}"
    arguments = dict(zip(names, [*arrays, *scales, slots]))
    return Case(name, "reshape_and_cache_fp8", arguments, {**_meaning(value_type), "format": format})


def dequantize_case(
    rng: np.random.Generator,
    value_type: str,
    shape: tuple[int, int, int, int],
    block: str | None,
    format: str,
) -> Case:
    """A call of `dequant_cache` on all blocks, or on a list with repeats and blocks that do not exist."""
    blocks, block_size, heads, _ = shape
    arguments = {
        "q": rng.integers(0, 256, shape, np.uint8).view({**CODES, **STATIC}[format]),
        "scales": floats((blocks * block_size, heads), "float32", rng),
    }
    if block:
        arguments["blocks"] = np.array([blocks - 1, -1, 0, blocks, blocks - 1], block)
    out_type = "uint16" if value_type == "bfloat16" else value_type
    arguments["out"] = filled((5 if block else blocks, *shape[1:]), out_type)
    name = f"dequantize-{value_type}-{format}-{'x'.join(map(str, shape))}-{block or 'all'}"
    return Case(name, "dequant_cache", arguments, {**_meaning(value_type), "format": format})


def attention_case(
    rng: np.random.Generator, query_type: str, cache_type: str, sizes: tuple[int, int] = (20, 12)
) -> Case:
    """A call of `paged_attention`: a chunk of a prompt, a decoding step, an empty sequence; all options."""
    seq_lens, starts = np.array([6, 0, 9], "i4"), np.array([0, 2, 2, 3], "i4")
    table = np.array([[4, 1, -7], [2**30, -1, 0], [0, 3, 2]], "i4")
    arguments = {"query": _normal(rng, (3, 4, sizes[0]), query_type)}
    options: dict[str, Any] = {"sliding_window": 7, "soft_cap": 5.0}
    for name, size in zip(("key", "value"), sizes):
        shape = (5, BLOCK_SIZE, 2, size)
        if cache_type in CODES:
            codes = rng.integers(-127, 127, shape)
            codes[codes == -1] = 1  # as fp8, -1 and 127 are NaN
            arguments[f"{name}_cache"] = codes.astype("i1").view(CODES[cache_type])
            options["format"] = cache_type
            largest = 0.01 if cache_type.startswith("int8") else 0.003
            arguments[f"{name}_scales"] = rng.uniform(largest / 10, largest, (20, 2)).astype("f4")
        elif cache_type in STATIC:
            codes = rng.integers(0, 0x40, shape) | 0x80 * rng.integers(0, 2, shape)  # e5m2 below 2
            arguments[f"{name}_cache"] = codes.astype(STATIC[cache_type])
            options["format"] = cache_type
            arguments[f"{name}_scales"] = rng.uniform(0.1, 1, 2).astype("f4")
        else:
            arguments[f"{name}_cache"] = _normal(rng, shape, cache_type)
    arguments.update(block_table=table, seq_lens=seq_lens, query_start_loc=starts)
    arguments["sinks"] = np.array([0, 1, -np.inf, -2], "f4")
    arguments["out"] = filled((3, 4, sizes[1]), arguments["query"].dtype.name)
    arguments["lse"] = filled((3, 4), "float32")
    if "bfloat16" in (query_type, cache_type):
        options["dtype"] = "bfloat16"
    return Case(f"attention-{query_type}-{cache_type}-{sizes[0]}", "paged_attention", arguments, options)


def merge_case(rng: np.random.Generator, value_type: str) -> Case:
    """A call of `merge_attention_states`, where one of the states is empty and one pair is."""
    arguments = {}
    for name in "ab":
        arguments[f"out_{name}"] = _normal(rng, (3, 4, 9), value_type)
        arguments[f"lse_{name}"] = rng.standard_normal((3, 4)).astype("f4")
    arguments["lse_a"][0, 1] = arguments["lse_a"][2, 3] = arguments["lse_b"][2, 3] = -np.inf
    arguments["out"] = filled((3, 4, 9), arguments["out_a"].dtype.name)
    arguments["lse"] = filled((3, 4), "float32")
    return Case(f"merge-{value_type}", "merge_attention_states", arguments, _meaning(value_type))


def move_case(
    rng: np.random.Generator, dtype: str, block: str, shape: tuple[int, ...], arrays: int = 2
) -> Case:
    """A call of `move_blocks` into packed arrays, between ids of every kind that is to be skipped."""
    limits = np.iinfo(block)
    arguments = {
        "source_ids": np.array([2, -1, 0, 1, limits.max, 3, limits.min, 1], block),
        "target_ids": np.array([0, 2, -1, 3, 1, limits.max, limits.min, 4], block),
    }
    for number in range(arrays):
        arguments[f"source_{number}"] = filled((3, *shape), dtype, rng)
        arguments[f"target_{number}"] = filled((4, *shape[:-1], 2 * shape[-1]), dtype)[..., : shape[-1]]
    return Case(f"move-{dtype}-{block}-{'x'.join(map(str, shape))}", "move_blocks", arguments, {})


def slots_case(table: str, position: str, slot: str) -> Case:
    """A call of `slot_mapping` with most options, on padding and places that do not exist."""
    large = np.iinfo(position).max
    arguments = {
        "block_table": np.array([5, 2, -1, 7, 2**30, 1], table),
        "positions": np.array([0, 9, 3, -1, large, 2, 40, 7, 30, 5, 6], position),
        "batch_indices": np.array([0, 0, 1, 1, 0, -1, 2, 3, 2, 2**30, 1], table),
        "seq_lens": np.array([10, 7, 41], table),
        "kv_indptr": np.array([0, 3, 4, 6], table),
        "out": filled((11,), slot),
    }
    options = {"block_size": BLOCK_SIZE, "window": 6, "num_sinks": 2}
    return Case(f"slots-{table}-{position}-{slot}", "slot_mapping", arguments, options)


def places_case(index: str) -> Case:
    """A call of `get_batch_indices_positions` with padding at the end."""
    arguments = {
        "append_indptr": np.array([0, 2, 2, 5], index),
        "seq_lens": np.array([9, 0, 3], index),
        "out": filled((7,), index),
        "positions": filled((7,), index),
    }
    return Case(f"places-{index}", "get_batch_indices_positions", arguments, {"nnz": 7})


def rotary_case(rng: np.random.Generator, value_type: str, index: str, interleaved: bool) -> Case:
    """A call of `rotary_and_cache` on part of each head, with positions and slots that do not exist."""
    fused = _normal(rng, (5, 5, 10), value_type)
    angles = rng.uniform(0, 7, (6, 3))
    slots = np.array([3, -1, 11, 12], index)
    arguments = {
        "positions": np.array([5, 0, 6, 2, -1], index),
        "query": fused[:, :3],
        "key": fused[:, 3:],
        "value": _normal(rng, (5, 2, 7), value_type),
        "cos_sin_cache": np.concatenate([np.cos(angles), np.sin(angles)], 1).astype("f4"),
        "key_cache": filled((3, BLOCK_SIZE, 2, 10), fused.dtype),
        "value_cache": filled((3, BLOCK_SIZE, 2, 7), fused.dtype),
        "slot_mapping": slots,
    }
    options = {"interleaved": interleaved, **_meaning(value_type)}
    return Case(f"rotary-{value_type}-{index}-{interleaved}", "rotary_and_cache", arguments, options)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], value_type: str) -> np.ndarray:
    return reference.from_float32(rng.standard_normal(shape).astype("f4"), value_type)


def _meaning(value_type: str) -> dict[str, str]:
    """The option that says what uint16 arrays hold."""
    return {"dtype": "bfloat16"} if value_type == "bfloat16" else {}


def all_cases() -> list[Case]:
    """Every small case; together they launch every packaged module."""
    rng = np.random.default_rng(5)
    whole, packed, interleaved = "contiguous", "packed", "interleaved"
    found = []
    for slot in SLOT_TYPES:
        writes = [("float32", 7, 2, (12, 12), whole), ("uint8", 3, 1, (16, 16), whole)]
        writes += [("float16", 2, 3, (96, 96), whole), ("float32", 3, 1, (36, 36), whole)]
        for dtype in ("uint8", "uint16", "uint32", "uint64"):
            writes += [(dtype, 5, 3, (9, 3), whole), (dtype, 3, 2, (3, 3), packed)]
            writes += [(dtype, 3, 1, (7, 7), interleaved)]
            found.append(move_case(rng, dtype, slot, (2, 3, 3)))
        found.append(move_case(rng, "uint16", slot, (2, 1, 72), arrays=8))
        found += [write_case(rng, *shape, slot) for shape in writes]
        for value_type in VALUE_TYPES:
            shapes = [(11, 3, (64, 64), whole), (2, 1, (16, 16), interleaved), (3, 2, (48, 48), packed)]
            shapes += [(5, 3, (128, 128), whole)]
            shapes += [(3, 2, (5, 3), whole), (2, 1, (1, 1), packed), (3, 2, (46, 46), whole)]
            found += [
                quantize_case(rng, value_type, *shape, slot, format) for format in CODES for shape in shapes
            ]
            found += [
                cast_case(rng, value_type, *shape, slot, format) for format in STATIC for shape in shapes
            ]
    for value_type in VALUE_TYPES:
        for size in (72, 20, 3):
            found += [
                dequantize_case(rng, value_type, (3, 2, 3, size), block, format)
                for format in (*CODES, "fp8_e5m2")
                for block in (None, *SLOT_TYPES)
            ]
        for code in (*VALUE_TYPES, *CODES, "fp8_e5m2"):
            found += [attention_case(rng, value_type, code, sizes) for sizes in ((20, 12), (32, 16))]
        found.append(merge_case(rng, value_type))
        found += [rotary_case(rng, value_type, slot, slot == "int32") for slot in SLOT_TYPES]
    found += [slots_case(*types) for types in itertools.product(SLOT_TYPES, repeat=3)]
    found += [places_case(index) for index in SLOT_TYPES]
    return found
