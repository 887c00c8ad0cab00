"""Decode blocks of contiguous rows, four values an item; neighbouring items take neighbouring values."""

import numpy as np

from .blocks import block_shown
from .codecs import codec_of
from .parts import index_in_row, spread
from .vectors import each
from .views import load, store

TYPES = {
    "value": ("float32", "bfloat16"),  # not float16: a CPU converts neighbouring halves of an item
    "code": ("int8", "float8_e4m3fn", "float8_e5m2"),
    "block": ("int32", "int64"),
}
FOUR = tuple(range(4))
ZEROS = (np.float32(0.0),) * 4


def dequantize_cpu(
    item: "nditem[3]",  # (parts of a quarter row, rows of a block, blocks of the result), rows rounded up
    codes: "code[block, row, element=1]",
    scales: "float32[block, row]",
    blocks: "block[n]",  # not read unless `listed`
    out: "value[n, row, element=1]",
    listed: "int64",
    num_blocks: "int64",
    rows: "int64",
    head_size: "int64",  # a multiple of 4
):
    """Result block `n` shows block ``blocks[n]``, or block `n`; zeros where there is no such block."""
    quarter = head_size >> 2
    elements = each(spread, FOUR, index_in_row(item, quarter), quarter)
    row = item.get_global_id(1)
    n = item.get_global_id(2)
    if row < rows:
        block = block_shown(blocks, n, listed)
        if 0 <= block < num_blocks:
            scale = load(scales, block, row)
            values = each(codec_of(codes).value_of, load(codes, block, row, elements), scale)
            store(out, values, n, row, elements)
        else:
            store(out, ZEROS, n, row, elements)
