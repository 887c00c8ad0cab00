"""Write rows of 8-byte words into evenly spaced slots, a few words at a time: what a CPU vectorizes best.

Two neighbouring words an item, as `scatter` has them, are one wide message to a GPU; a CPU has to
take them apart again. Here neighbouring items take neighbouring words, which are one vector.
"""

from .parts import start_of

TYPES = {"slot": ("int32", "int64")}
IN_RECORD = True


def scatter_words(
    item: "nditem[2]",  # (a vector's words, tokens), tokens rounded up
    key: "uint64*",  # IN   rows of `row` words, `key_stride` apart
    value: "uint64*",  # IN
    key_cache: "uint64*",  # OUT  slots of `row` words, `key_cache_stride` apart
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
    lane = item.get_local_id(0)
    width = item.get_local_range(0)
    token = item.get_global_id(1)
    if token < num_tokens:
        slot = slot_mapping[token * slot_stride]
        if 0 <= slot < num_slots:
            part = 0
            while part * width < row:
                word = start_of(part, width, row) + lane
                key_word = key[token * key_stride + word]
                value_word = value[token * value_stride + word]
                key_cache[slot * key_cache_stride + word] = key_word
                value_cache[slot * value_cache_stride + word] = value_word
                part += 1
