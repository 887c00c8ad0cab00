"""Decode blocks of contiguous rows to float32, two fours an item, half a row apart.

A lane stores 16 bytes at a time, right beside its neighbour's. Eights of float32 would leave gaps: an H200
then takes 1.6 times as long.
"""

import numpy as np

from .blocks import show_two_runs

TYPES = {"value": ("float32",), "code": ("int8", "float8_e4m3fn", "float8_e5m2"), "block": ("int32", "int64")}
ZEROS = (np.float32(0.0),) * 4


def dequantize_gpu_float32(
    item: "nditem[3]",  # (parts of half a row, rows of a block, blocks of the result), rows rounded up
    codes: "code*4[block, row, four=1]",
    scales: "float32[block, row]",
    blocks: "block[n]",  # not read unless `listed`
    out: "value*4[n, row, four=1]",
    listed: "int64",
    num_blocks: "int64",
    rows: "int64",
    head_size: "int64",
):
    """Result block `n` shows block ``blocks[n]``, or block `n`; zeros where there is no such block."""
    show_two_runs(item, codes, scales, blocks, out, listed, num_blocks, rows, head_size >> 2, ZEROS)
