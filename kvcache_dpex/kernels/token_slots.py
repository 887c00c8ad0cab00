"""Slots of tokens, out of their positions and a table of blocks, a token an item."""

import numpy as np

from .sequences import sequence_of
from .views import load, store

TYPES = {"table": ("int32", "int64"), "position": ("int32", "int64"), "slot": ("int32", "int64")}
MOST = np.int64(2**32)  # positions that a 32-bit division takes


def token_slots(
    item: "item[1]",
    block_table: "table[row, column]",
    positions: "position[token]",
    batch_indices: "table[token]",  # not read unless `indexed`
    query_start_loc: "table[n]",  # not read unless `started`
    seq_lens: "table[sequence]",  # not read unless `limited`
    kv_indptr: "table[n]",  # not read unless `compressed`
    out: "slot[token]",
    indexed: "int64",
    started: "int64",
    limited: "int64",
    compressed: "int64",
    num_tokens: "int64",
    num_seqs: "int64",
    num_columns: "int64",
    block_size: "int64",
    window: "int64",  # 0 for none
    num_sinks: "int64",
    num_blocks: "int64",  # beyond them a slot does not fit its type
):
    """Slot of each token; -1 for padding and wherever the table has no block."""
    token = item.get_id(0)
    if token < num_tokens:
        sequence = token
        if indexed != 0:
            sequence = np.int64(load(batch_indices, token))
        elif started != 0:
            sequence = sequence_of(query_start_loc, token, num_seqs)
        cell = np.int64(-1)
        position = np.int64(load(positions, token))
        if 0 <= sequence < num_seqs and 0 <= position < MOST:
            seq_len = np.int64(0)
            if limited != 0:
                seq_len = np.int64(load(seq_lens, sequence))
            cell = cell_of(position, window, num_sinks, seq_len)
        slot = np.int64(-1)
        if cell >= 0:
            column = np.int64(np.uint32(cell) // np.uint32(block_size))
            offset = cell - column * block_size
            row = sequence
            end = num_columns
            if compressed != 0:
                row = np.int64(0)
                column += np.int64(load(kv_indptr, sequence))
                end = min(end, np.int64(load(kv_indptr, sequence + 1)))
            if 0 <= column < end:
                block = np.int64(load(block_table, row, column))
                if 0 <= block < num_blocks:
                    slot = block * block_size + offset
        store(out, slot, token)


def cell_of(position, window, num_sinks, seq_len):
    """The place of a position among those that are kept; -1 where a newer token of the call takes it."""
    cell = position
    if window != 0 and position >= num_sinks:
        past = position - num_sinks
        cell = num_sinks + past - np.int64(np.uint32(past) // np.uint32(window)) * window
        if position + window < seq_len:
            cell = np.int64(-1)
    return cell
