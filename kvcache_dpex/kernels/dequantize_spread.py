"""Decode blocks of int8 codes, four values an item, a quarter of a head apart: what a CPU vectorizes best.

As `dequantize`, but neighbouring items take neighbouring values.
"""

import numpy as np

from . import device
from .int8 import ZERO, decoded
from .parts import index_in_row

# Not float16: a CPU converts neighbouring halves together, others one by one.
TYPES = {"value": ("float32", "bfloat16"), "block": ("int32", "int64")}


def dequantize_spread(
    item: "nditem[3]",  # (parts of a quarter of a head, rows of a block, blocks of the result)
    codes: "int8*",  # IN   blocks of `rows` rows of four quarters, `codes_block` apart
    scales: "float32*",  # IN   blocks of `rows` scales, `scales_block` apart
    blocks: "block*",  # IN   which block each block of the result shows; not read unless `listed`
    out: "value*",  # OUT  blocks of `rows` rows of four quarters, one after another
    listed: "int64",
    num_blocks: "int64",
    quarter: "int64",
    rows: "int64",
    blocks_stride: "int64",
    codes_block: "int64",
    scales_block: "int64",
):
    """Result block `n` shows block `blocks[n]`, or block `n`; zeros where there is no such block."""
    value = index_in_row(item, quarter)
    row = item.get_global_id(1)
    n = item.get_global_id(2)
    if row < rows:
        block = n
        if listed != 0:
            block = np.int64(blocks[n * blocks_stride])
        a, b, c, d = ZERO, ZERO, ZERO, ZERO
        if 0 <= block < num_blocks:
            scale = scales[block * scales_block + row]
            at = block * codes_block + 4 * row * quarter + value
            a = decoded(np.float32(codes[at]), scale)
            b = decoded(np.float32(codes[at + quarter]), scale)
            c = decoded(np.float32(codes[at + 2 * quarter]), scale)
            d = decoded(np.float32(codes[at + 3 * quarter]), scale)
        to = 4 * (n * rows + row) * quarter + value
        device.store(out, to, a)
        device.store(out, to + quarter, b)
        device.store(out, to + 2 * quarter, c)
        device.store(out, to + 3 * quarter, d)
