"""The oracle of the plain write, against rows worked out by hand and against the slot formula."""

import numpy as np
import pytest

from helpers import SENTINEL, random_bits, sentinel
from kvcache_dpex import reference


def test_by_hand():
    """Two blocks of two slots, one head of one element."""
    key = np.array([10, 11, 12, 13, 14]).reshape(5, 1, 1)
    key_cache, value_cache = reference.empty_cache(2, 2, 1, 1, dtype="int64")
    reference.reshape_and_cache(key, -key, key_cache, value_cache, np.array([3, -1, 0, 4, 1]))
    assert key_cache.ravel().tolist() == [12, 14, 0, 10]
    assert value_cache.ravel().tolist() == [-12, -14, 0, -10]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "complex64"])
def test_by_the_slot_formula(dtype):
    """Element (h, d) of slot s is element (s * num_kv_heads + h) * head_size + d; all others stay."""
    rng = np.random.default_rng(2)
    num_blocks, block_size, num_kv_heads, head_size = 5, 4, 3, 7
    slots = [7, -1, 19, 0, -9, 20, 8]
    key = random_bits(rng, (7, num_kv_heads, head_size), dtype)
    value = random_bits(rng, (7, num_kv_heads, head_size), dtype)
    caches = [sentinel((num_blocks, block_size, num_kv_heads, head_size), dtype) for _ in range(2)]
    reference.reshape_and_cache(key, value, *caches, slots)
    for rows, cache in zip((key, value), caches):
        flat = sentinel(cache.size, dtype)
        for token, slot in enumerate(slots):
            for head in range(num_kv_heads):
                for element in range(head_size):
                    if 0 <= slot < num_blocks * block_size:
                        at = (slot * num_kv_heads + head) * head_size + element
                        flat[at] = rows[token, head, element]
        np.testing.assert_array_equal(cache.ravel().view("u1"), flat.view("u1"))
        assert (cache[0, 1].view("u1") == SENTINEL).all()


def test_the_last_of_equal_slots_wins_and_surplus_rows_are_ignored():
    key = np.arange(4).reshape(4, 1, 1)
    key_cache, value_cache = reference.empty_cache(1, 2, 1, 1, dtype="int64")
    reference.reshape_and_cache(key, key, key_cache, value_cache, [1, 1])
    assert key_cache.ravel().tolist() == [0, 1]


def test_empty_cache():
    for cache in reference.empty_cache(2, 3, 4, 5, dtype="float16"):
        assert (cache.shape, cache.dtype, cache.any()) == ((2, 3, 4, 5), np.float16, False)
