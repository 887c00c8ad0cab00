"""Write contiguous rows into evenly spaced slots, 16 bytes an item."""

from .parts import index_in_row
from .views import load, store

TYPES = {"slot": ("int32", "int64")}


def scatter_gpu(
    item: "nditem[2]",  # (parts of a row, tokens), tokens rounded up
    key: "uint64*2[token, unit=1]",
    value: "uint64*2[token, unit=1]",
    key_cache: "uint64*2[slot, unit=1]",
    value_cache: "uint64*2[slot, unit=1]",
    slot_mapping: "slot[token]",  # outside [0, num_slots) the token is skipped
    num_tokens: "int64",
    num_slots: "int64",
    row: "int64",  # units of 16 bytes
):
    """Copy row `token` of key and value to slot ``slot_mapping[token]``."""
    unit = index_in_row(item, row)
    token = item.get_global_id(1)
    if token < num_tokens:
        slot = load(slot_mapping, token)
        if 0 <= slot < num_slots:
            key_words = load(key, token, unit)
            value_words = load(value, token, unit)
            store(key_cache, key_words, slot, unit)
            store(value_cache, value_words, slot, unit)
