"""Quantize rows into slots, a few lanes a row and every so many values a lane: what a CPU vectorizes best.

As `quantize_lanes`, but neighbouring lanes take neighbouring values, each a vector of its own; the eights
of a lane, a wide message to a GPU, a CPU has to take apart.
"""

import numpy as np

from . import device
from .int8 import code_of, divisor_of, inverse_of, is_special, largest16, lifted16, limit_of, scale_of

# Not float16: a CPU converts neighbouring halves together, others one by one.
TYPES = {"value": ("float32", "bfloat16"), "slot": ("int32", "int64")}
IN_RECORD = True

HALF = device.LOCAL_WORDS // 2  # where the values' part of a work-group's memory begins


def load4(pointer, at, lanes):
    """Four values of a row, `lanes` apart."""
    return (
        device.load(pointer, at),
        device.load(pointer, at + lanes),
        device.load(pointer, at + 2 * lanes),
        device.load(pointer, at + 3 * lanes),
    )


def load_spread(pointer, at, lanes):
    """Sixteen values of a row, `lanes` apart."""
    return (
        load4(pointer, at, lanes)
        + load4(pointer, at + 4 * lanes, lanes)
        + load4(pointer, at + 8 * lanes, lanes)
        + load4(pointer, at + 12 * lanes, lanes)
    )


def put4(codes, to, lanes, a, b, c, d, divisor, inverse):
    """The codes of `load4`'s values, where it found them."""
    codes[to] = code_of(a, divisor, inverse)
    codes[to + lanes] = code_of(b, divisor, inverse)
    codes[to + 2 * lanes] = code_of(c, divisor, inverse)
    codes[to + 3 * lanes] = code_of(d, divisor, inverse)


def put_spread(codes, to, lanes, x, absmax, scale):
    """The codes of `load_spread`'s values, where it found them."""
    divisor = divisor_of(absmax, scale)
    inverse = inverse_of(absmax, divisor)
    if is_special(absmax):
        x = lifted16(x, limit_of(absmax, divisor))
    put4(codes, to, lanes, x[0], x[1], x[2], x[3], divisor, inverse)
    put4(codes, to + 4 * lanes, lanes, x[4], x[5], x[6], x[7], divisor, inverse)
    put4(codes, to + 8 * lanes, lanes, x[8], x[9], x[10], x[11], divisor, inverse)
    put4(codes, to + 12 * lanes, lanes, x[12], x[13], x[14], x[15], divisor, inverse)


def quantize_spread(
    item: "nditem[3]",  # (lanes of a head, heads, tokens), all three within a work-group, rounded up
    key: "value*",  # IN
    value: "value*",  # IN
    key_codes: "int8*",  # OUT
    value_codes: "int8*",  # OUT
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
    slot = np.int64(-1)
    if head < num_kv_heads and token < num_tokens:
        slot = np.int64(slot_mapping[token * slot_stride])
    written = 0 <= slot < num_slots
    # A lane without a row reads row 0 and writes nothing: every item must come to the barrier.
    from_head = head if written else 0
    from_token = token if written else 0
    k = load_spread(key, from_token * key_token + from_head * key_head + lane, lanes)
    v = load_spread(value, from_token * value_token + from_head * value_head + lane, lanes)
    device.put_local(row * lanes + lane, largest16(k))
    device.put_local(HALF + row * lanes + lane, largest16(v))
    device.barrier()
    key_absmax = device.get_local(row * lanes)
    value_absmax = device.get_local(HALF + row * lanes)
    other = row * lanes + 1
    while other < (row + 1) * lanes:
        key_absmax = device.larger(key_absmax, device.get_local(other))
        value_absmax = device.larger(value_absmax, device.get_local(HALF + other))
        other += 1
    if written:
        key_scale = scale_of(key_absmax)
        value_scale = scale_of(value_absmax)
        if lane == 0:
            key_scales[slot * key_scales_slot + head * key_scales_head] = key_scale
            value_scales[slot * value_scales_slot + head * value_scales_head] = value_scale
        to = slot * key_codes_slot + head * key_codes_head + lane
        put_spread(key_codes, to, lanes, k, key_absmax, key_scale)
        to = slot * value_codes_slot + head * value_codes_head + lane
        put_spread(value_codes, to, lanes, v, value_absmax, value_scale)
