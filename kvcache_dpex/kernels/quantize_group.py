"""Quantize rows into slots, a work-group a row, four values an item: no loop, so a CPU vectorizes it."""

from . import device
from .int8 import codes4, inverse_of, largest4, lift_of, scale_of

TYPES = {"value": ("float32", "float16", "bfloat16"), "slot": ("int32", "int64")}


def quantize_group(
    item: "item[3]",  # (fours of a head, heads, tokens), a work-group along the first axis
    key: "value*",  # IN   strides count fours, also of the codes
    value: "value*",  # IN
    key_codes: "uint32*",  # OUT
    value_codes: "uint32*",  # OUT
    key_scales: "float32*",  # OUT
    value_scales: "float32*",  # OUT
    slot_mapping: "slot*",  # IN   one slot a token; outside [0, num_slots) the token is skipped
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
    four = item.get_id(0)
    head = item.get_id(1)
    token = item.get_id(2)
    slot = slot_mapping[token * slot_stride]
    if 0 <= slot < num_slots:
        a, b, c, d = device.load4(key, 4 * (token * key_token + head * key_head + four))
        e, f, g, h = device.load4(value, 4 * (token * value_token + head * value_head + four))
        key_absmax = device.group_larger(largest4(a, b, c, d))
        value_absmax = device.group_larger(largest4(e, f, g, h))
        key_scale = scale_of(key_absmax)
        value_scale = scale_of(value_absmax)
        lift = lift_of(key_absmax)
        inverse = inverse_of(key_absmax, key_scale)
        key_word = codes4(a, b, c, d, lift, key_scale * lift, inverse)
        lift = lift_of(value_absmax)
        inverse = inverse_of(value_absmax, value_scale)
        value_word = codes4(e, f, g, h, lift, value_scale * lift, inverse)
        key_codes[slot * key_codes_slot + head * key_codes_head + four] = key_word
        value_codes[slot * value_codes_slot + head * value_codes_head + four] = value_word
        if four == 0:
            key_scales[slot * key_scales_slot + head * key_scales_head] = key_scale
            value_scales[slot * value_scales_slot + head * value_scales_head] = value_scale
