"""Which block of a cache a block of the result shows."""

import numpy as np

from .views import load


def block_shown(blocks, n, listed):
    """``blocks[n]``, or `n` itself where no blocks are listed."""
    block = n
    if listed != 0:
        block = np.int64(load(blocks, n))
    return block
