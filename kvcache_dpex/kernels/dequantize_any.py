"""Decode int8 codes of any size and stride, a value an item."""

import numpy as np

from . import device
from .int8 import ZERO, decoded
from .parts import index_in_row

TYPES = {"value": ("float32", "float16", "bfloat16"), "block": ("int32", "int64")}


def dequantize_any(
    item: "nditem[3]",  # (parts of a head, heads, slots of the result), slots rounded up
    codes: "int8*",  # IN
    scales: "float32*",  # IN
    blocks: "block*",  # IN   which block each block of the result shows; not read unless `listed`
    out: "value*",  # OUT
    listed: "int64",
    num_blocks: "int64",
    num_slots: "int64",  # of the result, at most 2**32: no 64-bit division
    block_size: "int64",
    head_size: "int64",
    blocks_stride: "int64",
    codes_block: "int64",
    codes_offset: "int64",
    codes_head: "int64",
    codes_element: "int64",
    scales_block: "int64",
    scales_offset: "int64",
    scales_head: "int64",
    out_block: "int64",
    out_offset: "int64",
    out_head: "int64",
    out_element: "int64",
):
    """Result block `n` shows block `blocks[n]`, or block `n`; zeros where there is no such block."""
    element = index_in_row(item, head_size)
    head = item.get_global_id(1)
    slot = item.get_global_id(2)
    if slot < num_slots:
        n = np.int64(np.uint32(slot) // np.uint32(block_size))
        offset = slot - n * block_size
        block = n
        if listed != 0:
            block = np.int64(blocks[n * blocks_stride])
        value = ZERO
        if 0 <= block < num_blocks:
            code = codes[
                block * codes_block + offset * codes_offset + head * codes_head + element * codes_element
            ]
            scale = scales[block * scales_block + offset * scales_offset + head * scales_head]
            value = decoded(np.float32(code), scale)
        to = n * out_block + offset * out_offset + head * out_head + element * out_element
        device.store(out, to, value)
