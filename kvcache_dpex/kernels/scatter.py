"""Write rows of 16-byte units into slots that are evenly spaced: the usual cache, at full width."""

from .parts import index_in_row

# A unit is two neighbouring 8-byte words; strides and `row` count units.
TYPES = {"slot": ("int32", "int64")}


def scatter(
    item: "nditem[2]",  # (parts of a row, tokens), tokens rounded up
    key: "uint64*",  # IN   rows of `row` units, `key_stride` apart
    value: "uint64*",  # IN
    key_cache: "uint64*",  # OUT  slots of `row` units, `key_cache_stride` apart
    value_cache: "uint64*",  # OUT
    slot_mapping: "slot*",  # IN   one slot a token; outside [0, num_slots) the token is skipped
    num_tokens: "int64",
    row: "int64",
    num_slots: "int64",
    slot_stride: "int64",
    key_stride: "int64",
    value_stride: "int64",
    key_cache_stride: "int64",
    value_cache_stride: "int64",
):
    """Copy row `token` of key and value to slot `slot_mapping[token]`."""
    unit = index_in_row(item, row)
    token = item.get_global_id(1)
    if token < num_tokens:
        slot = slot_mapping[token * slot_stride]
        if 0 <= slot < num_slots:
            key_from = 2 * (token * key_stride + unit)
            value_from = 2 * (token * value_stride + unit)
            key_to = 2 * (slot * key_cache_stride + unit)
            value_to = 2 * (slot * value_cache_stride + unit)
            key_low = key[key_from]
            key_high = key[key_from + 1]
            value_low = value[value_from]
            value_high = value[value_from + 1]
            key_cache[key_to] = key_low
            key_cache[key_to + 1] = key_high
            value_cache[value_to] = value_low
            value_cache[value_to + 1] = value_high
