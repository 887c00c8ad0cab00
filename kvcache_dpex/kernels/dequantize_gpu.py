"""Decode blocks of contiguous rows to 16-bit values, two eights an item, half a row apart."""

import numpy as np

from .blocks import show_two_runs

TYPES = {
    "value": ("float16", "bfloat16"),
    "code": ("int8", "float8_e4m3fn", "float8_e5m2"),
    "block": ("int32", "int64"),
}
ZEROS = (np.float32(0.0),) * 8


def dequantize_gpu(
    item: "nditem[3]",  # (parts of half a row, rows of a block, blocks of the result), rows rounded up
    codes: "code*8[block, row, eight=1]",
    scales: "float32[block, row]",
    blocks: "block[n]",  # not read unless `listed`
    out: "value*8[n, row, eight=1]",
    listed: "int64",
    num_blocks: "int64",
    rows: "int64",
    head_size: "int64",
):
    """Result block `n` shows block ``blocks[n]``, or block `n`; zeros where there is no such block."""
    show_two_runs(item, codes, scales, blocks, out, listed, num_blocks, rows, head_size >> 3, ZEROS)
