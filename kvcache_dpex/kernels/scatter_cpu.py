"""Write contiguous rows into evenly spaced slots; neighbouring items copy neighbouring words.

A CPU makes one vector of them, where it would take the 16 bytes of `scatter_gpu`'s items apart.
"""

from .parts import start_of
from .views import load, store

TYPES = {"slot": ("int32", "int64")}
IN_RECORD = True


def scatter_cpu(
    item: "nditem[2]",  # (words of a vector, tokens), tokens rounded up
    key: "uint64[token, word=1]",
    value: "uint64[token, word=1]",
    key_cache: "uint64[slot, word=1]",
    value_cache: "uint64[slot, word=1]",
    slot_mapping: "slot[token]",  # outside [0, num_slots) the token is skipped
    num_tokens: "int64",
    num_slots: "int64",
    row: "int64",  # words
):
    """Copy row `token` of key and value to slot ``slot_mapping[token]``."""
    lane = item.get_local_id(0)
    width = item.get_local_range(0)
    token = item.get_global_id(1)
    if token < num_tokens:
        slot = load(slot_mapping, token)
        if 0 <= slot < num_slots:
            part = 0
            while part * width < row:
                word = start_of(part, width, row) + lane
                key_word = load(key, token, word)
                value_word = load(value, token, word)
                store(key_cache, key_word, slot, word)
                store(value_cache, value_word, slot, word)
                part += 1
