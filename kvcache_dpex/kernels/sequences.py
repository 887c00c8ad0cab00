"""Which sequence a token of a batch belongs to, and where in a cache a sequence's tokens lie."""

import numpy as np

from .views import load


def query_place(query_start_loc, seq_lens, token, num_seqs, listed):
    """The sequence of a query token and its position there; sequence -1 for a token of none.

    Sequence `n` is tokens ``query_start_loc[n]`` to ``query_start_loc[n + 1] - 1``, or token `n` where no
    starts are listed. Its last token is the newest of its ``seq_lens[n]`` tokens.
    """
    sequence = token
    end = token + 1
    if listed != 0:
        sequence = sequence_of(query_start_loc, token, num_seqs)
        end = np.int64(load(query_start_loc, sequence + 1)) if sequence >= 0 else token
    position = np.int64(load(seq_lens, sequence)) - end + token if sequence >= 0 else np.int64(0)
    return sequence, position


def sequence_of(starts, token, num_seqs):
    """The sequence with ``starts[sequence] <= token < starts[sequence + 1]``, by bisection; -1 if none."""
    low = np.int64(0)
    high = num_seqs + 1
    while low < high:
        middle = (low + high) >> 1
        if load(starts, middle) <= token:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low <= num_seqs else np.int64(-1)


def slot_of(block_table, sequence, position, block_size, num_blocks):
    """Block and offset of a position; block -1 where the table names none of the cache's."""
    column = np.int64(np.uint32(position) // np.uint32(block_size))
    block = np.int64(load(block_table, sequence, column))
    return block if 0 <= block < num_blocks else np.int64(-1), position - column * block_size


def part_of(start, stop, split, splits, unit):
    """The `split`-th equal part of ``start <= position < stop``, of whole units; parts may be empty."""
    units = np.uint32(max(stop - start, 0) + unit - 1) // np.uint32(unit)
    size = np.int64((units + np.uint32(splits) - np.uint32(1)) // np.uint32(splits)) * unit
    first = start + split * size
    return first, min(first + size, stop)
