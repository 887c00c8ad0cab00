"""Decode blocks of int8 codes, two runs an item, half a row apart; a run fills 16 bytes once decoded."""

import numpy as np

from . import device
from .int8 import NO_CODES, ZERO, decoded4
from .parts import index_in_row

TYPES = {"value": ("float32", "float16", "bfloat16"), "block": ("int32", "int64")}


def load_run(codes, run, wide):
    """The codes of a run, in two words; of a run of four values in the first."""
    return device.load_pair(codes, 2 * run) if wide == 8 else (codes[run], NO_CODES)


def store_run(out, run, words, scale, wide):
    """The values of `load_run`'s codes."""
    a, b, c, d = decoded4(words[0], scale)
    if wide == 8:
        e, f, g, h = decoded4(words[1], scale)
        device.store8(out, 8 * run, a, b, c, d, e, f, g, h)
    else:
        device.store4(out, 4 * run, a, b, c, d)


def dequantize(
    item: "nditem[3]",  # (parts of half a head, rows of a block, blocks of the result), rows rounded up
    codes: "uint32*",  # IN   blocks of `rows` rows of `runs` runs, `codes_block` runs apart
    scales: "float32*",  # IN   blocks of `rows` scales, `scales_block` apart
    blocks: "block*",  # IN   which block each block of the result shows; not read unless `listed`
    out: "value*",  # OUT  blocks of `rows` rows of `runs` runs, one after another
    listed: "int64",
    num_blocks: "int64",
    runs: "int64",
    rows: "int64",
    blocks_stride: "int64",
    codes_block: "int64",
    scales_block: "int64",
):
    """Result block `n` shows block `blocks[n]`, or block `n`; zeros where there is no such block."""
    wide = device.wide(out)
    half = (runs + 1) >> 1
    first = index_in_row(item, half)
    second = first + runs - half
    row = item.get_global_id(1)
    n = item.get_global_id(2)
    if row < rows:
        block = n
        if listed != 0:
            block = np.int64(blocks[n * blocks_stride])
        low = NO_CODES, NO_CODES
        high = NO_CODES, NO_CODES
        scale = ZERO
        if 0 <= block < num_blocks:
            scale = scales[block * scales_block + row]
            at = block * codes_block + row * runs
            low = load_run(codes, at + first, wide)
            high = load_run(codes, at + second, wide)
        to = (n * rows + row) * runs
        store_run(out, to + first, low, scale, wide)
        store_run(out, to + second, high, scale, wide)
