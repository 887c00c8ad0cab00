"""Rotate query and key by the tokens' positions and write key and value into slots of any strides."""

import numpy as np

from .intrinsics import fma
from .views import load, store

TYPES = {"value": ("float32", "float16", "bfloat16"), "index": ("int32", "int64")}


def rotate_and_scatter(
    item: "nditem[3]",  # (elements of a head, heads of query and of key, tokens), all but heads rounded up
    positions: "index[token]",
    query: "value[token, head, element]",
    key: "value[token, head, element]",
    value: "value[token, head, element]",
    cos_sin_cache: "float32[position, element]",
    key_cache: "value[block, offset, head, element]",
    value_cache: "value[block, offset, head, element]",
    slot_mapping: "index[token]",  # outside [0, num_slots) the token is not written
    num_tokens: "int64",
    num_mapped: "int64",
    num_positions: "int64",
    num_slots: "int64",  # at most 2**32, so that a 32-bit division finds the block
    block_size: "int64",
    num_q_heads: "int64",
    head_size: "int64",
    value_size: "int64",
    half: "int64",  # pairs of a head that are rotated
    far: "int64",  # elements from the first of a pair to the second
    near: "int64",  # elements from a pair to the next one
):
    """An item rotates a pair or copies an element that is not rotated, and copies one of the value."""
    element = item.get_global_id(0)
    head = item.get_global_id(1)
    token = item.get_global_id(2)
    if token < num_tokens:
        position = np.int64(load(positions, token))
        if 0 <= position < num_positions:
            first = element * near
            if head < num_q_heads:
                if element < half:
                    rotate(query, token, head, first, first + far, cos_sin_cache, position, element, half)
            else:
                head -= num_q_heads
                slot = np.int64(-1)
                if token < num_mapped:
                    slot = np.int64(load(slot_mapping, token))
                written = 0 <= slot < num_slots
                block = np.int64(np.uint32(slot) // np.uint32(block_size))
                offset = slot - block * block_size
                if element < half:
                    rotate(key, token, head, first, first + far, cos_sin_cache, position, element, half)
                    if written:
                        second = first + far
                        store(key_cache, load(key, token, head, first), block, offset, head, first)
                        store(key_cache, load(key, token, head, second), block, offset, head, second)
                elif written and element + half < head_size:
                    passed = element + half
                    store(key_cache, load(key, token, head, passed), block, offset, head, passed)
                if written and element < value_size:
                    store(value_cache, load(value, token, head, element), block, offset, head, element)


def rotate(rows, token, head, first, second, cos_sin_cache, position, pair, half):
    """Rotate two elements of a row, in place, by the angle of their pair; one product of each is rounded."""
    cos = load(cos_sin_cache, position, pair)
    sin = load(cos_sin_cache, position, half + pair)
    x = load(rows, token, head, first)
    y = load(rows, token, head, second)
    store(rows, fma(x, cos, -(y * sin)), token, head, first)
    store(rows, fma(y, cos, x * sin), token, head, second)
