"""Decode codes of any size and strides, a value an item."""

import numpy as np

from .blocks import block_shown
from .codecs import codec_of
from .parts import index_in_row
from .views import load, store

TYPES = {
    "value": ("float32", "float16", "bfloat16"),
    "code": ("int8", "float8_e4m3fn", "float8_e5m2"),
    "block": ("int32", "int64"),
}


def dequantize_strided(
    item: "nditem[3]",  # (parts of a head, heads, slots of the result), slots rounded up
    codes: "code[block, offset, head, element]",
    scales: "float32[block, offset, head]",
    blocks: "block[n]",  # not read unless `listed`
    out: "value[n, offset, head, element]",
    listed: "int64",
    num_blocks: "int64",
    num_slots: "int64",  # of the result, at most 2**32, so that a 32-bit division finds the block
    block_size: "int64",
    head_size: "int64",
):
    """Result block `n` shows block ``blocks[n]``, or block `n`; zeros where there is no such block."""
    element = index_in_row(item, head_size)
    head = item.get_global_id(1)
    slot = item.get_global_id(2)
    if slot < num_slots:
        n = np.int64(np.uint32(slot) // np.uint32(block_size))
        offset = slot - n * block_size
        block = block_shown(blocks, n, listed)
        value = np.float32(0.0)
        if 0 <= block < num_blocks:
            scale = load(scales, block, offset, head)
            value = codec_of(codes).value_of(load(codes, block, offset, head, element), scale)
        store(out, value, n, offset, head, element)
