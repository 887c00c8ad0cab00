"""Write rows of any size and strides into caches of any strides, a word an item."""

import numpy as np

from .parts import index_in_row
from .views import load, store

TYPES = {"word": ("uint8", "uint16", "uint32", "uint64"), "slot": ("int32", "int64")}


def scatter_strided(
    item: "nditem[3]",  # (parts of a head, heads, tokens), tokens rounded up
    key: "word[token, head, element]",
    value: "word[token, head, element]",
    key_cache: "word[block, offset, head, element]",
    value_cache: "word[block, offset, head, element]",
    slot_mapping: "slot[token]",  # outside [0, num_slots) the token is skipped
    num_tokens: "int64",
    num_slots: "int64",  # at most 2**32, so that a 32-bit division finds the block
    block_size: "int64",
    key_size: "int64",
    value_size: "int64",
):
    """Copy row `token` of key and value to slot ``slot_mapping[token]``."""
    head = item.get_global_id(1)
    token = item.get_global_id(2)
    if token < num_tokens:
        slot = load(slot_mapping, token)
        if 0 <= slot < num_slots:
            block = np.int64(np.uint32(slot) // np.uint32(block_size))
            offset = slot - block * block_size
            key_element = index_in_row(item, key_size)
            value_element = index_in_row(item, value_size)
            key_word = load(key, token, head, key_element)
            value_word = load(value, token, head, value_element)
            store(key_cache, key_word, block, offset, head, key_element)
            store(value_cache, value_word, block, offset, head, value_element)
