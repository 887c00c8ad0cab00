"""Quantize rows into slots: a few lanes a head, two eights of values a lane, a short reduction."""

import numpy as np

from .codecs import codec_of
from .intrinsics import abs_bits, barrier, get_local, max_i32, put_local
from .vectors import each, fold
from .views import load, store

TYPES = {
    "value": ("float32", "float16", "bfloat16"),
    "code": ("int8", "float8_e4m3fn"),
    "slot": ("int32", "int64"),
}


def quantize_gpu(
    item: "nditem[3]",  # (lanes of a head, heads, tokens), all three within a work-group, rounded up
    key: "value*8[token, head, eight=1]",
    value: "value*8[token, head, eight=1]",
    key_codes: "code*8[slot, head, eight=1]",
    value_codes: "code*8[slot, head, eight=1]",
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
    inside = head < num_kv_heads and token < num_tokens
    # Every item must come to the barrier: one without a row reads row 0 and stores nothing. Rows are
    # read before it is known whether their slot takes them, so that one wait serves both.
    from_head = head if inside else 0
    from_token = token if inside else 0
    slot = np.int64(load(slot_mapping, from_token))
    k = load(key, from_token, from_head, lane) + load(key, from_token, from_head, lane + lanes)
    v = load(value, from_token, from_head, lane) + load(value, from_token, from_head, lane + lanes)
    row = item.get_local_id(2) * item.get_local_range(1) + item.get_local_id(1)
    first = np.int32(2 * row * lanes)
    end = first + np.int32(2 * lanes)
    own = first + np.int32(2 * lane)
    put_local(own, fold(max_i32, each(abs_bits, k)))
    put_local(own + 1, fold(max_i32, each(abs_bits, v)))
    barrier()
    key_absmax = get_local(first)
    value_absmax = get_local(first + 1)
    other = np.int32(first + 2)
    while other < end:
        key_absmax = max_i32(key_absmax, get_local(other))
        value_absmax = max_i32(value_absmax, get_local(other + 1))
        other = np.int32(other + 2)
    if inside and 0 <= slot < num_slots:
        codec = codec_of(key_codes)
        key_scale = codec.scale_of(key_absmax)
        value_scale = codec.scale_of(value_absmax)
        if lane == 0:
            store(key_scales, key_scale, slot, head)
            store(value_scales, value_scale, slot, head)
        codes = codec.codes_of(k, key_absmax, key_scale)
        store(key_codes, codes[:8], slot, head, lane)
        store(key_codes, codes[8:], slot, head, lane + lanes)
        codes = codec.codes_of(v, value_absmax, value_scale)
        store(value_codes, codes[:8], slot, head, lane)
        store(value_codes, codes[8:], slot, head, lane + lanes)
