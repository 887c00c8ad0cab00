"""Which block of a cache a block of the result shows, and how contiguous rows of it are decoded."""

import numpy as np

from .codecs import codec_of
from .parts import index_in_row
from .vectors import each
from .views import load, row_from, store


def block_shown(blocks, n, listed):
    """``blocks[n]``, or `n` itself where no blocks are listed."""
    block = n
    if listed != 0:
        block = np.int64(load(blocks, n))
    return block


def show_two_runs(item, codes, scales, blocks, out, listed, num_blocks, rows, runs, zeros):
    """Decode two vectors of a row of `runs` vectors, half a row apart, to a row of `out`.

    They are `zeros` where there is no such block.
    """
    half = (runs + 1) >> 1
    first = index_in_row(item, half)
    second = first + runs - half
    row = item.get_global_id(1)
    n = item.get_global_id(2)
    if row < rows:
        block = block_shown(blocks, n, listed)
        out_row = row_from(out, n, row, 0)
        if 0 <= block < num_blocks:
            codec = codec_of(codes)
            scale = load(scales, block, row)
            low = load(codes, block, row, first)
            high = load(codes, block, row, second)
            store(out_row, each(codec.value_of, low, scale), first)
            store(out_row, each(codec.value_of, high, scale), second)
        else:
            store(out_row, zeros, first)
            store(out_row, zeros, second)
