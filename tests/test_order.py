"""A launch comes after all earlier work on its queue, whoever submitted it, and before all later work."""

import gc
import warnings

import numpy as np
import pytest

from helpers import to_device
from kvcache_dpex import empty_cache, reshape_and_cache
from kvcache_dpex.runtime.compile import compiler
from kvcache_dpex.runtime.launch import arrays

TOKENS, HEADS, SIZE = 4096, 8, 128  # a copy of 16 MiB takes milliseconds


def memory_of(array):
    return array.get_array().usm_data


@pytest.fixture
def write_last(any_queue):
    """Caches of 8 slots, 16 MiB of keys, and a write of the last 8 of them."""
    import dpnp

    caches = empty_cache(2, 4, HEADS, SIZE, device=any_queue)
    key = dpnp.zeros((TOKENS, HEADS, SIZE), dtype="float32", sycl_queue=any_queue)
    slots = dpnp.arange(8, dtype="int64", sycl_queue=any_queue)
    any_queue.wait()
    return caches, key, lambda: reshape_and_cache(key[-8:], key[-8:], *caches, slots)


def assert_all(cache, number):
    np.testing.assert_array_equal(arrays.to_numpy(cache), np.full(cache.shape, number, "float32"))


def test_after_a_copy_that_the_caller_submitted(any_queue, policy, write_last):
    """dpctl #2293: no event of `memcpy_async` is known to anybody but its caller."""
    caches, key, write = write_last
    for turn in range(1, 21):
        source = to_device(np.full(key.shape, turn, "float32"), any_queue)
        any_queue.wait()
        copied = any_queue.memcpy_async(memory_of(key), source.usm_data, key.nbytes)
        write()
        for cache in caches:
            assert_all(cache, turn)
        copied.wait()


def test_before_a_copy_that_the_caller_submits(any_queue, policy):
    """The write takes milliseconds; a copy of its last slots, submitted next, must not overtake it."""
    import dpnp

    shape = (TOKENS, HEADS, SIZE)
    caches = empty_cache(TOKENS // 16, 16, HEADS, SIZE, device=any_queue)
    slots = dpnp.arange(TOKENS, dtype="int64", sycl_queue=any_queue)
    seen = dpnp.zeros(shape, dtype="float32", sycl_queue=any_queue)
    for turn in range(1, 11):
        key = dpnp.full(shape, turn, dtype="float32", sycl_queue=any_queue)
        any_queue.wait()
        reshape_and_cache(key, key, *caches, slots)
        any_queue.memcpy_async(memory_of(seen), memory_of(caches[1]), seen.nbytes).wait()
        assert_all(seen, turn)


@pytest.mark.skipif(not compiler.available(), reason="numba-dpex is not installed")
def test_after_a_kernel_of_numba_dpex(any_queue, policy, write_last):
    """numba-dpex #916, #1185: `call_kernel_async` tells its event to its caller only."""
    import numba_dpex
    from numba_dpex import kernel_api

    @numba_dpex.kernel
    def fill(item: kernel_api.Item, array, number):
        i = item.get_id(0)
        for _ in range(40):
            array[i] = number

    caches, key, write = write_last
    flat = key.reshape(-1)
    for turn in range(1, 11):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numba warns that its own launcher is not parallel
            numba_dpex.call_kernel_async(fill, kernel_api.Range(flat.size), (), flat, np.float32(turn))
        write()
        for cache in caches:
            assert_all(cache, turn)


@pytest.mark.parametrize("size", [128, 3])
def test_after_dpnps_earlier_work(any_queue, policy, size):
    """dpnp takes milliseconds over a large array; the write of its last rows must not overtake it."""
    import dpnp

    key_cache, value_cache = empty_cache(2, 4, 8, size, device=any_queue)
    large = dpnp.zeros((4_000_000 // size // 8, 8, size), dtype="float32", sycl_queue=any_queue)
    slots = dpnp.arange(8, dtype="int64", sycl_queue=any_queue)
    for turn in range(1, 11):
        dpnp.add(large, 1, out=large)
        reshape_and_cache(large[-8:], large[-8:], key_cache, value_cache, slots)
        assert (arrays.to_numpy(key_cache) == turn).all()
        assert (arrays.to_numpy(value_cache) == turn).all()


@pytest.mark.parametrize("size", [128, 3])
def test_before_dpnps_later_work(any_queue, policy, size):
    """The write takes milliseconds; dpnp's reading of the last slots must not overtake it."""
    import dpnp

    tokens = 4_000_000 // size // 8 // 16 * 16
    key_cache, value_cache = empty_cache(tokens // 16, 16, 8, size, device=any_queue)
    slots = dpnp.arange(tokens, dtype="int64", sycl_queue=any_queue)
    key = dpnp.zeros((tokens, 8, size), dtype="float32", sycl_queue=any_queue)
    for turn in range(1, 11):
        dpnp.add(key, 1, out=key)
        any_queue.wait()
        reshape_and_cache(key, key, key_cache, value_cache, slots)
        seen = dpnp.copy(key_cache[-1:]), dpnp.copy(value_cache[-1:])
        dpnp.add(key, 0.5, out=key)
        dpnp.subtract(key, 0.5, out=key)
        for part in seen:
            assert (arrays.to_numpy(part) == turn).all()


def test_arguments_live_until_the_kernel_has_ended(any_queue, policy):
    """dpctl #751: 300 launches on temporaries that are deleted at once, and whose memory is used again."""
    import dpnp

    tokens, size = 32, 64
    key_cache, value_cache = empty_cache(300, tokens, 1, size, device=any_queue)
    for turn in range(300):
        key = dpnp.full((tokens, 1, size), turn + 1, dtype="float32", sycl_queue=any_queue)
        slots = dpnp.arange(turn * tokens, (turn + 1) * tokens, dtype="int64", sycl_queue=any_queue)
        reshape_and_cache(key, -key, key_cache, value_cache, slots)
        del key, slots
        if turn % 50 == 0:
            gc.collect()
        dpnp.full((tokens, 1, size), np.nan, dtype="float32", sycl_queue=any_queue)
    wanted = np.arange(1, 301, dtype="float32")[:, None, None, None]
    np.testing.assert_array_equal(arrays.to_numpy(key_cache), np.broadcast_to(wanted, key_cache.shape))
    np.testing.assert_array_equal(arrays.to_numpy(value_cache), np.broadcast_to(-wanted, value_cache.shape))
