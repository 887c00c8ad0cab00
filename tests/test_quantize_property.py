"""Quantize and dequantize over shapes, layouts, dtypes, slots and blocks that nobody thought of."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import random_bits, sentinel
from quantizing import VALUES, check_dequantize, check_quantize, option, rows_of, stored
from test_write_property import view

no_compiler = pytest.mark.parametrize("runner", ["plain", "packaged"], indirect=True)
OUTSIDE = [-1, -2, -(2**31), 2**31 - 1]
anything = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def in_lines(draw, make, shape, dtype):
    """An array whose last axis has no gaps, and whose other strides and offset are multiples of 16."""
    *leading, size = shape
    order, steps = list(range(len(leading))), [1] * len(leading)
    if draw(st.sampled_from([False] * 6 + [True])):
        order = draw(st.permutations(order))
        steps = [draw(st.sampled_from([1, 1, 2])) for _ in leading]
    room = [each * step for each, step in zip(leading, steps)]
    width = -(-size // 16) * 16 if draw(st.booleans()) else size
    offset = draw(st.sampled_from([0, 0, 16, 64]))
    memory = make(offset + int(np.prod([*room, width])), dtype)[offset:]
    array = memory.reshape(*(room[axis] for axis in order), width)
    array = array.transpose(*np.argsort(order), len(order))
    return array[tuple(slice(None, None, step) for step in steps)][..., :size]


def arrays_of(wide, make, shape, dtype):
    return (in_lines if wide else view)(make, shape, dtype)


@st.composite
def scales_of(draw, blocks, block_size, heads):
    shape = draw(st.sampled_from([(blocks * block_size, heads), (blocks, block_size, heads)]))
    return draw(view(sentinel, shape, "float32"))


@st.composite
def quantizings(draw):
    """dtype and arguments of a quantizing write, on NumPy arrays."""
    dtype, wide = draw(st.sampled_from(VALUES)), draw(st.sampled_from([True, True, False]))
    tokens, blocks = draw(st.sampled_from([5, 7, 6, 3, 1, 0])), draw(st.sampled_from([4, 3, 5, 2, 1, 0]))
    block_size, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    sizes = [draw(st.sampled_from([16, 32, 4, 48, 64, 20] if wide else [1, 2, 3, 4, 8, 16, 17]))] * 2
    if not wide and draw(st.booleans()):
        sizes[1] = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for size in sizes:
        array = draw(arrays_of(wide, sentinel, (tokens, heads, size), stored(0, dtype).dtype))
        array[...] = rows_of(rng, array.shape, dtype)
        rows.append(array)
    codes = [draw(arrays_of(wide, sentinel, (blocks, block_size, heads, size), "int8")) for size in sizes]
    by_slot = view(sentinel, (blocks * block_size, heads), "float32")
    scales = [draw(by_slot if wide else scales_of(blocks, block_size, heads)) for _ in sizes]
    capacity = blocks * block_size
    values = rng.permutation(capacity)[: max(0, tokens - draw(st.sampled_from([0, 0, 1])))]
    if len(values):
        outside = st.sampled_from([*OUTSIDE, capacity, capacity + 1, -capacity])
        values[0] = draw(st.sampled_from([values[0], draw(outside)]))
    slots = draw(view(np.zeros, (len(values),), draw(st.sampled_from(["int32", "int64"]))))
    slots[...] = values
    return dtype, (*rows, *codes, *scales, slots)


@st.composite
def decodings(draw):
    """dtype, arguments and blocks of a decoding, on NumPy arrays."""
    dtype, wide = draw(st.sampled_from(VALUES)), draw(st.booleans())
    blocks = draw(st.sampled_from([4, 3, 2, 1, 0]))
    block_size, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    size = draw(st.sampled_from([4, 8, 64, 68] if wide else [1, 2, 3, 4, 17]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = draw(arrays_of(wide, sentinel, (blocks, block_size, heads, size), "int8"))
    codes[...] = random_bits(rng, codes.shape, "int8")
    scales = draw(scales_of(blocks, block_size, heads))
    scales[...] = np.where(
        rng.integers(0, 2, scales.shape), random_bits(rng, scales.shape, "float32"), rng.random(scales.shape)
    )
    chosen, shown = None, (blocks,)
    if draw(st.booleans()):
        values = draw(st.lists(st.one_of(st.integers(-1, blocks), st.sampled_from(OUTSIDE)), max_size=6))
        chosen = draw(view(np.zeros, (len(values),), draw(st.sampled_from(["int32", "int64"]))))
        chosen[...] = values
        shown = chosen.shape
    if chosen is not None and len(chosen) % 2 == 0 and draw(st.booleans()):
        chosen = np.ascontiguousarray(chosen).reshape(2, -1)
        out = sentinel((*chosen.shape, block_size, heads, size), stored(0, dtype).dtype)
    else:
        out = draw(arrays_of(wide, sentinel, (*shown, block_size, heads, size), stored(0, dtype).dtype))
    return dtype, (codes, scales, out), chosen


@anything
@given(case=quantizings())
def test_any_quantizing(kernel, queue, case):
    dtype, arguments = case
    check_quantize(queue, *arguments, **option(dtype))


@no_compiler
@settings(anything, max_examples=40)
@given(case=quantizings())
def test_any_quantizing_in_every_runner(runner, queue, case):
    dtype, arguments = case
    check_quantize(queue, *arguments, **option(dtype))


@no_compiler
@settings(anything, max_examples=50)
@given(case=decodings())
def test_any_decoding(runner, queue, case):
    dtype, arguments, blocks = case
    check_dequantize(queue, *arguments, blocks=blocks, **option(dtype))
