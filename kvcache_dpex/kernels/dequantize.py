"""Decode blocks of int8 codes, two fours an item, half a row apart."""

import numpy as np

from . import device
from .int8 import NO_CODES, decoded4
from .parts import index_in_row

TYPES = {"value": ("float32", "float16", "bfloat16"), "block": ("int32", "int64")}


def dequantize(
    item: "nditem[3]",  # (parts of half a head, rows of a block, blocks of the result), rows rounded up
    codes: "uint32*",  # IN   blocks of `rows` rows of `fours` fours, `codes_block` fours apart
    scales: "float32*",  # IN   blocks of `rows` scales, `scales_block` apart
    blocks: "block*",  # IN   which block each block of the result shows; not read unless `listed`
    out: "value*",  # OUT  blocks of `rows` rows of `fours` fours, one after another
    listed: "int64",
    num_blocks: "int64",
    fours: "int64",
    rows: "int64",
    blocks_stride: "int64",
    codes_block: "int64",
    scales_block: "int64",
):
    """Result block `n` shows block `blocks[n]`, or block `n`; zeros where there is no such block."""
    half = fours >> 1
    four = index_in_row(item, half)
    row = item.get_global_id(1)
    n = item.get_global_id(2)
    if row < rows:
        block = n
        if listed != 0:
            block = np.int64(blocks[n * blocks_stride])
        a, b, c, d = device.unpack4(NO_CODES)
        e, f, g, h = device.unpack4(NO_CODES)
        if 0 <= block < num_blocks:
            scale = scales[block * scales_block + row]
            at = block * codes_block + row * fours + four
            low = codes[at]
            high = codes[at + half]
            a, b, c, d = decoded4(low, scale)
            e, f, g, h = decoded4(high, scale)
        to = 4 * ((n * rows + row) * fours + four)
        device.store4(out, to, a, b, c, d)
        device.store4(out, to + 4 * half, e, f, g, h)
