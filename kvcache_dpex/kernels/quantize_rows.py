"""Quantize rows of contiguous values of any number, a work-group a row and eight values an item."""

import numpy as np

from . import device
from .int8 import code_of, divisor_of, inverse_of, is_special, largest4, lifted4, limit_of, scale_of
from .parts import start_of

TYPES = {"value": ("float32", "float16", "bfloat16"), "slot": ("int32", "int64")}


def load8(pointer, at, lanes, size):
    """Eight values of a row, one of each part."""
    return (
        device.load(pointer, at + start_of(0, lanes, size)),
        device.load(pointer, at + start_of(1, lanes, size)),
        device.load(pointer, at + start_of(2, lanes, size)),
        device.load(pointer, at + start_of(3, lanes, size)),
        device.load(pointer, at + start_of(4, lanes, size)),
        device.load(pointer, at + start_of(5, lanes, size)),
        device.load(pointer, at + start_of(6, lanes, size)),
        device.load(pointer, at + start_of(7, lanes, size)),
    )


def largest8(x):
    """Bits of the largest of eight magnitudes."""
    return device.larger(largest4(x[0], x[1], x[2], x[3]), largest4(x[4], x[5], x[6], x[7]))


def put8(codes, to, lanes, size, x, absmax, scale):
    """The codes of `load8`'s values, where it found them."""
    divisor = divisor_of(absmax, scale)
    inverse = inverse_of(absmax, divisor)
    if is_special(absmax):
        limit = limit_of(absmax, divisor)
        x = lifted4(x[0], x[1], x[2], x[3], limit) + lifted4(x[4], x[5], x[6], x[7], limit)
    codes[to + start_of(0, lanes, size)] = code_of(x[0], divisor, inverse)
    codes[to + start_of(1, lanes, size)] = code_of(x[1], divisor, inverse)
    codes[to + start_of(2, lanes, size)] = code_of(x[2], divisor, inverse)
    codes[to + start_of(3, lanes, size)] = code_of(x[3], divisor, inverse)
    codes[to + start_of(4, lanes, size)] = code_of(x[4], divisor, inverse)
    codes[to + start_of(5, lanes, size)] = code_of(x[5], divisor, inverse)
    codes[to + start_of(6, lanes, size)] = code_of(x[6], divisor, inverse)
    codes[to + start_of(7, lanes, size)] = code_of(x[7], divisor, inverse)


def quantize_rows(
    item: "item[3]",  # (items of a work-group, heads, tokens)
    key: "value*",  # IN
    value: "value*",  # IN
    key_codes: "int8*",  # OUT
    value_codes: "int8*",  # OUT
    key_scales: "float32*",  # OUT
    value_scales: "float32*",  # OUT
    slot_mapping: "slot*",  # IN   one slot a token; outside [0, num_slots) the token is skipped
    lanes: "int64",  # items of a work-group: at least an eighth of a head, and no more than a head
    num_slots: "int64",  # at most 2**32, so that the block is found without a 64-bit division
    block_size: "int64",
    key_size: "int64",
    value_size: "int64",
    slot_stride: "int64",
    key_token: "int64",
    key_head: "int64",
    value_token: "int64",
    value_head: "int64",
    key_codes_block: "int64",
    key_codes_offset: "int64",
    key_codes_head: "int64",
    value_codes_block: "int64",
    value_codes_offset: "int64",
    value_codes_head: "int64",
    key_scales_block: "int64",
    key_scales_offset: "int64",
    key_scales_head: "int64",
    value_scales_block: "int64",
    value_scales_offset: "int64",
    value_scales_head: "int64",
):
    """Codes and scales of row `token`, head by head, go to slot `slot_mapping[token]`."""
    lane = item.get_id(0)
    head = item.get_id(1)
    token = item.get_id(2)
    slot = slot_mapping[token * slot_stride]
    if 0 <= slot < num_slots:
        block = np.int64(np.uint32(slot) // np.uint32(block_size))
        offset = slot - block * block_size
        k = load8(key, token * key_token + head * key_head + lane, lanes, key_size)
        v = load8(value, token * value_token + head * value_head + lane, lanes, value_size)
        key_absmax = device.group_larger(largest8(k))
        value_absmax = device.group_larger(largest8(v))
        key_scale = scale_of(key_absmax)
        value_scale = scale_of(value_absmax)
        to = block * key_codes_block + offset * key_codes_offset + head * key_codes_head + lane
        put8(key_codes, to, lanes, key_size, k, key_absmax, key_scale)
        to = block * value_codes_block + offset * value_codes_offset + head * value_codes_head + lane
        put8(value_codes, to, lanes, value_size, v, value_absmax, value_scale)
        if lane == 0:
            to = block * key_scales_block + offset * key_scales_offset + head * key_scales_head
            key_scales[to] = key_scale
            to = block * value_scales_block + offset * value_scales_offset + head * value_scales_head
            value_scales[to] = value_scale
