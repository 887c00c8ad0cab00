"""The oracle: every public operation again, on NumPy arrays, in loops that a reader believes at once.

Same names, same argument order, same in-place semantics as the package's operations. Where slots
repeat, the last row wins here; the device leaves the winner open.
"""

from __future__ import annotations

import numpy as np


def empty_cache(num_blocks, block_size, num_kv_heads, head_size, *, dtype="float32"):
    """Two caches of zeros, ``[num_blocks, block_size, num_kv_heads, head_size]``."""
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return np.zeros(shape, dtype), np.zeros(shape, dtype)


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping):
    """Copy row ``token`` of key and value to slot ``slot_mapping[token]``; other slots stay as they are."""
    num_blocks, block_size = key_cache.shape[:2]
    for token, slot in enumerate(slot_mapping):
        if 0 <= slot < num_blocks * block_size:
            block, offset = divmod(int(slot), block_size)
            key_cache[block, offset] = key[token]
            value_cache[block, offset] = value[token]
