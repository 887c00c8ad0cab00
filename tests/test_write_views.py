"""reshape_and_cache on strided views: strides decide, and no byte between the views changes."""

import numpy as np
import pytest

from helpers import Twins, check_write, random_bits, sentinel
from kvcache_dpex import reshape_and_cache
from kvcache_dpex.runtime.launch import arrays

BLOCKS, BLOCK_SIZE, HEADS, TOKENS = 5, 4, 2, 6
SLOTS = np.array([7, -1, 0, 19, 8])


def rows(rng, dtype, size):
    shape = (TOKENS, HEADS, size)
    return random_bits(rng, shape, dtype), random_bits(rng, shape, dtype)


def fused_qkv(rng, dtype, size):
    """Key and value are slices of the rows that one projection made: 4 query heads, then K, then V."""
    heads = random_bits(rng, (TOKENS, 4 + 2 * HEADS, size), dtype)
    return heads[:, 4 : 4 + HEADS], heads[:, 4 + HEADS :]


def heads_first(rng, dtype, size):
    """[num_kv_heads, num_tokens, head_size], as attention layers hand them over."""
    both = random_bits(rng, (2, HEADS, TOKENS, size), dtype)
    return both[0].transpose(1, 0, 2), both[1].transpose(1, 0, 2)


def every_second(rng, dtype, size):
    both = random_bits(rng, (2 * TOKENS, 2 * HEADS, 2 * size, 2), dtype)
    return both[::2, ::2, ::2, 0], both[1::2, 1::2, 1::2, 1]


def reversed_rows(rng, dtype, size):
    key, value = rows(rng, dtype, size)
    return key[::-1, ::-1, ::-1], value[::-1, :, ::-1]


def one_row_for_all(rng, dtype, size):
    """Broadcast keys and values: every token stride is 0."""
    key, value = rows(rng, dtype, size)
    return np.broadcast_to(key[:1], key.shape), np.broadcast_to(value[:, :1], value.shape)


def padded_heads(rng, dtype, size):
    """One element of padding behind each head: sizes suit wide words, strides do not."""
    both = random_bits(rng, (2, TOKENS, HEADS, size + 1), dtype)[..., :size]
    return both[0], both[1]


def padded_tokens(rng, dtype, size):
    """One element of padding behind each token, whose heads follow one another."""
    both = random_bits(rng, (2, TOKENS, HEADS * size + 1), dtype)[..., :-1].reshape(2, TOKENS, HEADS, size)
    return both[0], both[1]


def odd_offset(rng, dtype, size):
    """Rows that start one element after the start of their memory, where no wide word is aligned."""
    return tuple(
        random_bits(rng, TOKENS * HEADS * size + 1, dtype)[1:].reshape(TOKENS, HEADS, size) for _ in range(2)
    )


def caches(dtype, size):
    shape = (BLOCKS, BLOCK_SIZE, HEADS, size)
    return sentinel(shape, dtype), sentinel(shape, dtype)


def interleaved(dtype, size):
    """vllm-xpu-kernels #258: [num_blocks, 2, ...], so a block's stride is twice its size."""
    base = sentinel((BLOCKS, 2, BLOCK_SIZE, HEADS, size), dtype)
    return base[:, 0], base[:, 1]


def packed(dtype, size):
    """vllm-xpu-kernels #429: K and V share each head's row, so the head stride is twice the head size."""
    base = sentinel((BLOCKS, BLOCK_SIZE, HEADS, 2 * size), dtype)
    return base[..., :size], base[..., size:]


def in_turns(dtype, size):
    """Each slot holds its key row, then its value row."""
    base = sentinel((BLOCKS, BLOCK_SIZE, 2, HEADS, size), dtype)
    return base[:, :, 0], base[:, :, 1]


def hnd(dtype, size):
    """Memory in [num_blocks, num_kv_heads, block_size, head_size], seen as NHD."""
    base = sentinel((2, BLOCKS, HEADS, BLOCK_SIZE, size), dtype)
    return base[0].transpose(0, 2, 1, 3), base[1].transpose(0, 2, 1, 3)


def reversed_caches(dtype, size):
    key_cache, value_cache = caches(dtype, size)
    return key_cache[::-1, ::-1, ::-1, ::-1], value_cache[::-1, ::-1]


def some_blocks(dtype, size):
    key_cache, value_cache = (sentinel((2 * BLOCKS, BLOCK_SIZE, HEADS, size), dtype) for _ in range(2))
    return key_cache[::2], value_cache[1::2]


def transposed(dtype, size):
    """F order: the fastest axis is the block."""
    shape = (size, HEADS, BLOCK_SIZE, BLOCKS)
    return sentinel(shape, dtype).T, sentinel(shape, dtype).T


def padded_slots(dtype, size):
    """One element of padding behind each slot, whose heads follow one another."""
    base = sentinel((2, BLOCKS, BLOCK_SIZE, HEADS * size + 1), dtype)
    both = base[..., :-1].reshape(2, BLOCKS, BLOCK_SIZE, HEADS, size)
    return both[0], both[1]


def odd_caches(dtype, size):
    count = BLOCKS * BLOCK_SIZE * HEADS * size
    shape = (BLOCKS, BLOCK_SIZE, HEADS, size)
    return tuple(sentinel(count + 1, dtype)[1:].reshape(shape) for _ in range(2))


ROWS = [rows, fused_qkv, heads_first, every_second, reversed_rows, one_row_for_all]
ROWS += [padded_heads, padded_tokens, odd_offset]
CACHES = [caches, interleaved, packed, in_turns, hnd, reversed_caches, some_blocks, transposed]
CACHES += [padded_slots, odd_caches]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 8), ("float32", 3), ("int8", 16), ("uint16", 5)])
@pytest.mark.parametrize("make_caches", CACHES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("make_rows", ROWS, ids=lambda make: make.__name__)
def test_views(runner, queue, make_rows, make_caches, dtype, size):
    """Rows and caches of every layout, their whole memories compared.

    vllm-xpu-kernels #429, vllm-xpu-kernels #258, numba-dpex #572, dpnp #1649.
    """
    rng = np.random.default_rng(5)
    wrap = arrays.as_dpnp if dtype == "float32" else None
    check_write(queue, *make_rows(rng, dtype, size), *make_caches(dtype, size), SLOTS, wrap=wrap)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("make_caches", [caches, in_turns, hnd, padded_slots], ids=lambda make: make.__name__)
@pytest.mark.parametrize("make_rows", [rows, fused_qkv, one_row_for_all], ids=lambda make: make.__name__)
def test_views_of_whole_rows(whole_rows, queue, make_rows, make_caches, dtype):
    """Layouts that the kernels for whole rows take, and some that they must leave to the strided one."""
    rng = np.random.default_rng(6)
    check_write(queue, *make_rows(rng, dtype, 16), *make_caches(dtype, 16), SLOTS)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 3), ("float16", 5), ("int8", 12), ("int8", 15)])
def test_heads_padded_to_whole_words(runner, queue, dtype, size):
    """Addresses and strides are multiples of 8 bytes, head sizes are not: all elements are written."""
    rng = np.random.default_rng(8)
    padded = -(-size // 8) * 8
    key, value = random_bits(rng, (2, TOKENS, HEADS, padded), dtype)[..., :size]
    key_cache, value_cache = sentinel((2, BLOCKS, BLOCK_SIZE, HEADS, padded), dtype)[..., :size]
    check_write(queue, key, value, key_cache, value_cache, SLOTS)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64"])
@pytest.mark.parametrize("offset", range(1, 9))
def test_any_alignment(whole_rows, queue, offset, dtype):
    """Each of the four pointers off the 16-byte grid by itself, in rows that would else be whole units."""
    if dtype == "float64" and not queue.sycl_device.has_aspect_fp64:
        pytest.skip(f"{queue.sycl_device.name} has no float64 arrays")
    rng = np.random.default_rng(offset)
    for moved in range(4):
        shapes = [(3, 1, 16), (3, 1, 16), (2, 2, 1, 16), (2, 2, 1, 16)]
        memories = [random_bits(rng, 64 + 8, dtype) for _ in shapes]
        starts = [offset if index == moved else 0 for index in range(4)]
        views = [
            memory[start : start + np.prod(shape)].reshape(shape)
            for memory, start, shape in zip(memories, starts, shapes)
        ]
        check_write(queue, *views, np.array([2, -1, 1], "int32"))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    "step",
    [
        np.s_[:],
        np.s_[:, ::2, 1::2],
        np.s_[:, ::-1],
        np.s_[:, 5::-2, ::-2],
        np.s_[:, :, ::-2],
        np.s_[:, 3:],
        np.s_[:0],
        np.s_[:1, :1, :1],
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True], ids=["C", "T"])
def test_dlpack_views_keep_their_memory(queue, transposed, step, dtype):
    """Both orders, steps, reversals and offsets through DLPack: same pointer, same contents.

    dpctl #1071.
    """
    base = np.arange(2 * 6 * 7).reshape(2, 6, 7).astype(dtype)
    host = base[step].T if transposed else base[step]
    view = Twins(queue).view(host)
    other = arrays.tensor_module().from_dlpack(view)
    np.testing.assert_array_equal(arrays.to_numpy(other), host)
    if host.size:
        assert arrays.read(other, "key")[0] == arrays.read(view, "key")[0]
        assert other.strides == view.strides


def test_a_cache_view_through_dlpack_is_written_in_place(queue):
    """dpctl #1071: the view that came through DLPack is the cache, not a copy of it."""
    rng = np.random.default_rng(3)
    tensor = arrays.tensor_module()
    base = sentinel((BLOCKS, 2, BLOCK_SIZE, HEADS, 8), "float32")
    key, value = rows(rng, "float32", 8)
    host = key[::-1], value, base[:, 0], base[::-1, 1], SLOTS
    twins = Twins(queue)
    reshape_and_cache(*(tensor.from_dlpack(twins.view(array)) for array in host))
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            base[slot // 4, 0, slot % 4] = key[::-1][token]
            base[::-1][slot // 4, 1, slot % 4] = value[token]
    twins.assert_equal()
