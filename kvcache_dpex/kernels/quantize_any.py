"""Quantize rows of any size and stride into caches of any stride, a work-group a row."""

import numpy as np

from . import device
from .int8 import inverse_of, lift_of, rounded, scale_of

TYPES = {"value": ("float32", "float16", "bfloat16"), "slot": ("int32", "int64")}


def largest_of_row(pointer, at, stride, size, lane, lanes):
    """Bits of the largest magnitude of a row, the same for every item of the work-group."""
    largest = np.int32(0)
    index = lane
    while index < size:
        largest = device.larger(largest, device.magnitude(device.load(pointer, at + index * stride)))
        index += lanes
    return device.group_larger(largest)


def put_row(codes, to, codes_stride, pointer, at, stride, size, lane, lanes, absmax, scale):
    """The codes of a row, each item its own."""
    lift = lift_of(absmax)
    inverse = inverse_of(absmax, scale)
    index = lane
    while index < size:
        value = device.load(pointer, at + index * stride)
        codes[to + index * codes_stride] = device.code(rounded(value, lift, scale * lift, inverse))
        index += lanes


def quantize_any(
    item: "item[3]",  # (items of a work-group, heads, tokens)
    key: "value*",  # IN
    value: "value*",  # IN
    key_codes: "int8*",  # OUT
    value_codes: "int8*",  # OUT
    key_scales: "float32*",  # OUT
    value_scales: "float32*",  # OUT
    slot_mapping: "slot*",  # IN   one slot a token; outside [0, num_slots) the token is skipped
    lanes: "int64",
    num_slots: "int64",  # at most 2**32, so that the block is found without a 64-bit division
    block_size: "int64",
    key_size: "int64",
    value_size: "int64",
    slot_stride: "int64",
    key_token: "int64",
    key_head: "int64",
    key_element: "int64",
    value_token: "int64",
    value_head: "int64",
    value_element: "int64",
    key_codes_block: "int64",
    key_codes_offset: "int64",
    key_codes_head: "int64",
    key_codes_element: "int64",
    value_codes_block: "int64",
    value_codes_offset: "int64",
    value_codes_head: "int64",
    value_codes_element: "int64",
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
        key_at = token * key_token + head * key_head
        value_at = token * value_token + head * value_head
        key_absmax = largest_of_row(key, key_at, key_element, key_size, lane, lanes)
        value_absmax = largest_of_row(value, value_at, value_element, value_size, lane, lanes)
        key_scale = scale_of(key_absmax)
        value_scale = scale_of(value_absmax)
        to = block * key_codes_block + offset * key_codes_offset + head * key_codes_head
        put_row(
            key_codes,
            to,
            key_codes_element,
            key,
            key_at,
            key_element,
            key_size,
            lane,
            lanes,
            key_absmax,
            key_scale,
        )
        to = block * value_codes_block + offset * value_codes_offset + head * value_codes_head
        put_row(
            value_codes,
            to,
            value_codes_element,
            value,
            value_at,
            value_element,
            value_size,
            lane,
            lanes,
            value_absmax,
            value_scale,
        )
        if lane == 0:
            to = block * key_scales_block + offset * key_scales_offset + head * key_scales_head
            key_scales[to] = key_scale
            to = block * value_scales_block + offset * value_scales_offset + head * value_scales_head
            value_scales[to] = value_scale
