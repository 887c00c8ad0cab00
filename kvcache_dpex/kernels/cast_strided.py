"""Rows of any size and strides as codes, divided by a scale that is given, eight values an item."""

import numpy as np

from .codecs import codec_of
from .parts import own_lane, start_of
from .vectors import each
from .views import load, row_from, store

TYPES = {
    "value": ("float32", "float16", "bfloat16"),
    "code": ("float8_e4m3fn", "float8_e5m2"),
    "slot": ("int32", "int64"),
    "step": ("1", "any"),
}
PARTS = tuple(range(8))


def cast_strided(
    item: "item[3]",  # (lanes of a head, heads, tokens)
    key: "value[token, head, element=step]",
    value: "value[token, head, element=step]",
    key_codes: "code[block, offset, head, element=step]",
    value_codes: "code[block, offset, head, element=step]",
    key_scales: "float32[block, offset, head]",
    value_scales: "float32[block, offset, head]",
    slot_mapping: "slot[token]",  # outside [0, num_slots) the token is skipped
    num_slots: "int64",  # at most 2**32, so that a 32-bit division finds the block
    block_size: "int64",
    key_size: "int64",
    value_size: "int64",
    lanes: "int64",  # at least an eighth of a head
):
    """Codes of row `token`, head by head, go to slot ``slot_mapping[token]``."""
    lane = item.get_id(0)
    head = item.get_id(1)
    token = item.get_id(2)
    slot = load(slot_mapping, token)
    if 0 <= slot < num_slots:
        block = np.int64(np.uint32(slot) // np.uint32(block_size))
        offset = slot - block * block_size
        key_parts = each(start_of, PARTS, min(lanes, key_size), key_size)
        value_parts = each(start_of, PARTS, min(lanes, value_size), value_size)
        key_lane = own_lane(key, lane, key_size)
        value_lane = own_lane(value, lane, value_size)
        k = load(row_from(key, token, head, key_lane), key_parts)
        v = load(row_from(value, token, head, value_lane), value_parts)
        codec = codec_of(key_codes)
        codes = codec.codes_by(k, load(key_scales, block, offset, head))
        store(row_from(key_codes, block, offset, head, key_lane), codes, key_parts)
        codes = codec.codes_by(v, load(value_scales, block, offset, head))
        store(row_from(value_codes, block, offset, head, value_lane), codes, value_parts)
