"""Write rows of any size and stride into caches of any stride, a word at a time."""

import numpy as np

from .parts import index_in_row

TYPES = {"word": ("uint8", "uint16", "uint32", "uint64"), "slot": ("int32", "int64")}


def scatter_strided(
    item: "nditem[3]",  # (parts of a head, heads, tokens), tokens rounded up
    key: "word*",  # IN
    value: "word*",  # IN
    key_cache: "word*",  # OUT
    value_cache: "word*",  # OUT
    slot_mapping: "slot*",  # IN   one slot a token; outside [0, num_slots) the token is skipped
    num_tokens: "int64",
    num_slots: "int64",  # at most 2**32, so that the block is found without a 64-bit division
    block_size: "int64",
    key_size: "int64",  # words of a head; every stride counts words too
    value_size: "int64",
    slot_stride: "int64",
    key_token: "int64",
    key_head: "int64",
    key_word: "int64",
    value_token: "int64",
    value_head: "int64",
    value_word: "int64",
    key_cache_block: "int64",
    key_cache_offset: "int64",
    key_cache_head: "int64",
    key_cache_word: "int64",
    value_cache_block: "int64",
    value_cache_offset: "int64",
    value_cache_head: "int64",
    value_cache_word: "int64",
):
    """Copy row `token` of key and value to slot `slot_mapping[token]`."""
    head = item.get_global_id(1)
    token = item.get_global_id(2)
    if token < num_tokens:
        slot = slot_mapping[token * slot_stride]
        if 0 <= slot < num_slots:
            block = np.int64(np.uint32(slot) // np.uint32(block_size))
            offset = slot - block * block_size
            word = index_in_row(item, key_size)
            key_at = token * key_token + head * key_head + word * key_word
            key_to = block * key_cache_block + offset * key_cache_offset + head * key_cache_head
            key_to += word * key_cache_word
            word = index_in_row(item, value_size)
            value_at = token * value_token + head * value_head + word * value_word
            value_to = block * value_cache_block + offset * value_cache_offset + head * value_cache_head
            value_to += word * value_cache_word
            key_bits = key[key_at]
            value_bits = value[value_at]
            key_cache[key_to] = key_bits
            value_cache[value_to] = value_bits
