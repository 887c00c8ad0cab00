"""Write rows of any size and stride into caches of any stride, a word at a time."""

import numpy as np

TYPES = {"word": ("uint8", "uint16", "uint32", "uint64"), "slot": ("int32", "int64")}


def scatter_strided(
    item: "item[3]",  # (words of a head, heads, tokens), the first rounded up
    key: "word*",  # IN
    value: "word*",  # IN
    key_cache: "word*",  # OUT
    value_cache: "word*",  # OUT
    slot_mapping: "slot*",  # IN   one slot a token; outside [0, num_slots) the token is skipped
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
    word = item.get_id(0)
    head = item.get_id(1)
    token = item.get_id(2)
    slot = slot_mapping[token * slot_stride]
    if 0 <= slot < num_slots:
        block = np.int64(np.uint32(slot) // np.uint32(block_size))
        offset = slot - block * block_size
        if word < key_size:
            key_cache[
                block * key_cache_block
                + offset * key_cache_offset
                + head * key_cache_head
                + word * key_cache_word
            ] = key[token * key_token + head * key_head + word * key_word]
        if word < value_size:
            value_cache[
                block * value_cache_block
                + offset * value_cache_offset
                + head * value_cache_head
                + word * value_cache_word
            ] = value[token * value_token + head * value_head + word * value_word]
