"""Quantize rows into slots, a few lanes a row and sixteen values a lane: wide loads, a short reduction."""

import numpy as np

from . import device
from .int8 import largest16, load16, put16, scale_of

TYPES = {"value": ("float32", "float16", "bfloat16"), "slot": ("int32", "int64")}


def quantize_lanes(
    item: "nditem[3]",  # (lanes of a head, heads, tokens), all three within a work-group, rounded up
    key: "value*",  # IN   strides count eights, also of the codes
    value: "value*",  # IN
    key_codes: "uint32*",  # OUT
    value_codes: "uint32*",  # OUT
    key_scales: "float32*",  # OUT
    value_scales: "float32*",  # OUT
    slot_mapping: "slot*",  # IN   one slot a token; outside [0, num_slots) the token is skipped
    num_tokens: "int64",
    num_kv_heads: "int64",
    lanes: "int64",
    num_slots: "int64",
    slot_stride: "int64",
    key_token: "int64",
    key_head: "int64",
    value_token: "int64",
    value_head: "int64",
    key_codes_slot: "int64",
    key_codes_head: "int64",
    value_codes_slot: "int64",
    value_codes_head: "int64",
    key_scales_slot: "int64",
    key_scales_head: "int64",
    value_scales_slot: "int64",
    value_scales_head: "int64",
):
    """Codes and scales of row `token`, head by head, go to slot `slot_mapping[token]`."""
    lane = item.get_local_id(0)
    head = item.get_global_id(1)
    token = item.get_global_id(2)
    row = item.get_local_id(2) * item.get_local_range(1) + item.get_local_id(1)
    inside = head < num_kv_heads and token < num_tokens
    # An item without a row reads row 0 and writes nothing: every item must come to the barrier. Rows are
    # read before it is known whether their slot takes them, so that one wait serves both.
    from_head = head if inside else 0
    from_token = token if inside else 0
    slot = np.int64(slot_mapping[from_token * slot_stride])
    k = load16(key, from_token * key_token + from_head * key_head + lane, lanes)
    v = load16(value, from_token * value_token + from_head * value_head + lane, lanes)
    first = np.int32(2 * row * lanes)
    end = first + np.int32(2 * lanes)
    own = first + np.int32(2 * lane)
    device.put_local(own, largest16(k))
    device.put_local(own + 1, largest16(v))
    device.barrier()
    key_absmax = device.get_local(first)
    value_absmax = device.get_local(first + 1)
    other = np.int32(first + 2)
    while other < end:
        key_absmax = device.larger(key_absmax, device.get_local(other))
        value_absmax = device.larger(value_absmax, device.get_local(other + 1))
        other = np.int32(other + 2)
    if inside and 0 <= slot < num_slots:
        key_scale = scale_of(key_absmax)
        value_scale = scale_of(value_absmax)
        if lane == 0:
            key_scales[slot * key_scales_slot + head * key_scales_head] = key_scale
            value_scales[slot * value_scales_slot + head * value_scales_head] = value_scale
        to = slot * key_codes_slot + head * key_codes_head + lane
        put16(key_codes, to, lanes, k, key_absmax, key_scale)
        to = slot * value_codes_slot + head * value_codes_head + lane
        put16(value_codes, to, lanes, v, value_absmax, value_scale)
