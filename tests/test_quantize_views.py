"""reshape_and_cache_quant on strided rows, codes and scales: no byte between the views changes."""

import numpy as np
import pytest

from helpers import random_bits, sentinel
from quantizing import check_quantize, option, quantize_case
from test_write_views import BLOCK_SIZE, BLOCKS, CACHES, HEADS, ROWS, SLOTS

STORAGE = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}


def by_slot():
    shape = (BLOCKS * BLOCK_SIZE, HEADS)
    return sentinel(shape, "float32"), sentinel(shape, "float32")


def by_block():
    shape = (BLOCKS, BLOCK_SIZE, HEADS)
    return sentinel(shape, "float32"), sentinel(shape, "float32")


def in_turns():
    """Each slot holds the scales of its key, then those of its value."""
    both = sentinel((BLOCKS * BLOCK_SIZE, 2, HEADS), "float32")
    return both[:, 0], both[:, 1]


def every_second():
    both = sentinel((2 * BLOCKS * BLOCK_SIZE, 2 * HEADS + 1), "float32")
    return both[::2, 1::2], both[1::2, :-1:2]


def reversed_scales():
    key_scales, value_scales = by_slot()
    return key_scales[::-1, ::-1], value_scales[::-1]


def heads_first():
    both = sentinel((2, HEADS, BLOCKS * BLOCK_SIZE), "float32")
    return both[0].T, both[1].T


def padded_blocks():
    """Blocks of scales with room for more, which no one slot stride describes."""
    shape = (BLOCKS, BLOCK_SIZE + 3, HEADS)
    return sentinel(shape, "float32")[:, :BLOCK_SIZE], sentinel(shape, "float32")[:, 2:-1]


def interleaved_blocks():
    both = sentinel((BLOCKS, 2, BLOCK_SIZE, HEADS), "float32")
    return both[:, 0], both[::-1, 1]


SCALES = [
    by_slot,
    by_block,
    in_turns,
    every_second,
    reversed_scales,
    heads_first,
    padded_blocks,
    interleaved_blocks,
]


def name_of(make):
    return make.__name__


@pytest.mark.parametrize(("dtype", "size"), [("float32", 16), ("float16", 32), ("bfloat16", 5)])
@pytest.mark.parametrize("make_caches", CACHES, ids=name_of)
@pytest.mark.parametrize("make_rows", ROWS, ids=name_of)
def test_rows_and_codes(kernel, queue, make_rows, make_caches, dtype, size):
    """Rows and codes of every layout, their whole memories compared.

    vllm-xpu-kernels #429, vllm-xpu-kernels #258, numba-dpex #572, dpnp #1649.
    """
    rows = make_rows(np.random.default_rng(31), STORAGE[dtype], size)
    check_quantize(queue, *rows, *make_caches("int8", size), *by_slot(), SLOTS, **option(dtype))


@pytest.mark.parametrize("make_caches", CACHES[:4], ids=name_of)
@pytest.mark.parametrize("make_scales", SCALES, ids=name_of)
@pytest.mark.parametrize("size", [16, 3])
def test_scales(kernel, queue, make_scales, make_caches, size):
    rows = quantize_case(np.random.default_rng(32), "float32", size=size)[:2]
    check_quantize(queue, *rows, *make_caches("int8", size), *make_scales(), SLOTS)


@pytest.mark.parametrize("runner", ["plain", "packaged"], indirect=True)
@pytest.mark.parametrize("make_caches", CACHES, ids=name_of)
@pytest.mark.parametrize("make_scales", SCALES, ids=name_of)
def test_plain_python_steps_out_of_no_memory(runner, queue, make_scales, make_caches):
    rows = quantize_case(np.random.default_rng(33), "float16", size=4)[:2]
    check_quantize(queue, *rows, *make_caches("int8", 4), *make_scales(), SLOTS)


@pytest.mark.parametrize("padding", [0, 12, 4])
@pytest.mark.parametrize("size", [16, 20, 3])
def test_codes_and_scales_in_one_page(kernel, queue, size, padding):
    """Each block is a page of bytes: codes of K and of V, scales of K and of V, and padding."""
    codes, scales = BLOCK_SIZE * HEADS * size, BLOCK_SIZE * HEADS * 4
    pages = sentinel((BLOCKS, 2 * codes + 2 * scales + padding), "uint8")
    at = np.cumsum([0, codes, codes, scales, scales])
    parts = [pages[:, start:stop] for start, stop in zip(at, at[1:])]
    views = [part.view("int8").reshape(BLOCKS, BLOCK_SIZE, HEADS, size) for part in parts[:2]]
    views += [part.view("float32").reshape(BLOCKS, BLOCK_SIZE, HEADS) for part in parts[2:]]
    assert all(np.shares_memory(view, pages) for view in views)
    rows = quantize_case(np.random.default_rng(34), "bfloat16", size=size)[:2]
    check_quantize(queue, *rows, *views, SLOTS, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_any_alignment(kernel, queue, offset, dtype):
    """Rows, codes and scales off the grid of wide words, each by itself."""
    rng = np.random.default_rng(offset)
    shapes = [(3, 1, 16), (3, 1, 16), (2, 2, 1, 16), (2, 2, 1, 16), (4, 1), (4, 1)]
    types = [STORAGE[dtype]] * 2 + ["int8"] * 2 + ["float32"] * 2
    for moved in range(len(shapes)):
        memories = [random_bits(rng, 64 + 8, each) for each in types]
        starts = [offset if index == moved else 0 for index in range(len(shapes))]
        views = [
            memory[start : start + np.prod(shape)].reshape(shape)
            for memory, start, shape in zip(memories, starts, shapes)
        ]
        check_quantize(queue, *views, np.array([2, -1, 1], "int32"), **option(dtype))
