"""Quantize rows into slots, sixteen values a lane; neighbouring lanes take neighbouring values.

A CPU makes one vector of them, where it would take the eights of `quantize_gpu`'s lanes apart.
"""

import numpy as np

from .codecs import codec_of
from .intrinsics import LOCAL_WORDS, abs_bits, barrier, get_local, max_i32, put_local
from .parts import spread
from .vectors import each, fold
from .views import load, store

TYPES = {
    "value": ("float32", "bfloat16"),  # not float16: a CPU converts neighbouring halves of an item
    "code": ("int8", "float8_e4m3fn"),
    "slot": ("int32", "int64"),
}
IN_RECORD = True
HALF = LOCAL_WORDS // 2  # where the values' half of the local memory begins
SIXTEEN = tuple(range(16))


def quantize_cpu(
    item: "nditem[3]",  # (lanes of a head, heads, tokens), all three within a work-group, rounded up
    key: "value[token, head, element=1]",
    value: "value[token, head, element=1]",
    key_codes: "code[slot, head, element=1]",
    value_codes: "code[slot, head, element=1]",
    key_scales: "float32[slot, head]",
    value_scales: "float32[slot, head]",
    slot_mapping: "slot[token]",  # outside [0, num_slots) the token is skipped
    num_tokens: "int64",
    num_kv_heads: "int64",
    num_slots: "int64",
    lanes: "int64",
):
    """Codes and scales of row `token`, head by head, go to slot ``slot_mapping[token]``."""
    lane = item.get_local_id(0)
    head = item.get_global_id(1)
    token = item.get_global_id(2)
    slot = np.int64(-1)
    if head < num_kv_heads and token < num_tokens:
        slot = np.int64(load(slot_mapping, token))
    written = 0 <= slot < num_slots
    # Every item must come to the barrier: one without a row reads row 0 and stores nothing.
    from_head = head if written else 0
    from_token = token if written else 0
    elements = each(spread, SIXTEEN, lane, lanes)
    k = load(key, from_token, from_head, elements)
    v = load(value, from_token, from_head, elements)
    first = (item.get_local_id(2) * item.get_local_range(1) + item.get_local_id(1)) * lanes
    put_local(first + lane, fold(max_i32, each(abs_bits, k)))
    put_local(HALF + first + lane, fold(max_i32, each(abs_bits, v)))
    barrier()
    key_absmax = get_local(first)
    value_absmax = get_local(HALF + first)
    other = first + 1
    while other < first + lanes:
        key_absmax = max_i32(key_absmax, get_local(other))
        value_absmax = max_i32(value_absmax, get_local(HALF + other))
        other += 1
    if written:
        codec = codec_of(key_codes)
        key_scale = codec.scale_of(key_absmax)
        value_scale = codec.scale_of(value_absmax)
        if lane == 0:
            store(key_scales, key_scale, slot, head)
            store(value_scales, value_scale, slot, head)
        store(key_codes, codec.codes_of(k, key_absmax, key_scale), slot, head, elements)
        store(value_codes, codec.codes_of(v, value_absmax, value_scale), slot, head, elements)
