"""Decode blocks of contiguous rows, two eights of values an item, half a row apart."""

import numpy as np

from .blocks import block_shown
from .codecs import codec_of
from .parts import index_in_row
from .vectors import each
from .views import load, row_from, store

TYPES = {
    "value": ("float32", "float16", "bfloat16"),
    "code": ("int8", "float8_e4m3fn"),
    "block": ("int32", "int64"),
}
ZEROS = (np.float32(0.0),) * 8


def dequantize_gpu(
    item: "nditem[3]",  # (parts of half a row, rows of a block, blocks of the result), rows rounded up
    codes: "code*8[block, row, eight=1]",
    scales: "float32[block, row=1]",
    blocks: "block[n]",  # not read unless `listed`
    out: "value*8[n, row, eight=1]",
    listed: "int64",
    num_blocks: "int64",
    rows: "int64",
    head_size: "int64",
):
    """Result block `n` shows block ``blocks[n]``, or block `n`; zeros where there is no such block."""
    eights = head_size >> 3
    half = (eights + 1) >> 1
    first = index_in_row(item, half)
    second = first + eights - half
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
            store(out_row, ZEROS, first)
            store(out_row, ZEROS, second)
