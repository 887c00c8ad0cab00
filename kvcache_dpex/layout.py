"""Where a row lives: slots, blocks, shapes and strides, in plain integers.

A cache is ``[num_blocks, block_size, num_kv_heads, head_size]`` (NHD). Slot ``s`` is offset
``s % block_size`` of block ``s // block_size``, and its element ``(h, d)`` is element
``(s * num_kv_heads + h) * head_size + d`` of a contiguous cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index


def slot_of(block: int, offset: int, block_size: int) -> int:
    """Slot of one offset in one block.

    >>> slot_of(block=3, offset=5, block_size=16)
    53
    """
    return block * block_size + offset


def block_and_offset(slot: int, block_size: int) -> tuple[int, int]:
    """Block and offset of a slot.

    >>> block_and_offset(53, block_size=16)
    (3, 5)
    """
    return divmod(slot, block_size)


def slots_of_sequence(block_table: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """Slots of the tokens ``start <= position < stop`` of a sequence whose blocks are listed in order.

    A negative entry of `block_table` is a block that is no longer kept: its tokens have slot -1.

    >>> slots_of_sequence([7, 2], start=14, stop=18, block_size=16)
    [126, 127, 32, 33]
    >>> slots_of_sequence([-1, 2], start=14, stop=18, block_size=16)
    [-1, -1, 32, 33]
    """
    if stop > len(block_table) * block_size:
        raise ValueError(
            f"`block_table` holds {len(block_table)} blocks of {block_size}, so `stop` must be "
            f"<= {len(block_table) * block_size}, got {stop}; append a block to the table first"
        )
    if start < 0:
        raise ValueError(f"`start` must be >= 0, got {start}")
    slots: list[int] = []
    while start < stop:
        position, offset = divmod(start, block_size)
        block = int(block_table[position])  # an int32 entry would overflow
        count = min(block_size - offset, stop - start)
        first = slot_of(block, offset, block_size)
        slots.extend(range(first, first + count) if block >= 0 else [-1] * count)
        start += count
    return slots


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array.

    >>> contiguous_strides((4, 16, 8, 128))
    (16384, 1024, 128, 1)
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def uniform_slot_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements from one slot to the next where that is the same all over the cache, else None.

    True of contiguous caches and of keys and values packed in one row, not of interleaved blocks.

    >>> uniform_slot_stride((4, 16, 8, 128), (16384, 1024, 128, 1))
    1024
    """
    num_blocks, block_size = shape[:2]
    if block_size == 1:
        return strides[0]
    if num_blocks == 1 or strides[0] == block_size * strides[1]:
        return strides[1]
    return None


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int, int]:
    """Shape of a cache; raises where a size is no whole number or is out of range.

    >>> cache_shape(256, 16, 8, 128)
    (256, 16, 8, 128)
    """
    sizes = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
    }
    num_blocks, block_size, num_kv_heads, head_size = (
        whole_number(name, size, least=0 if name == "num_blocks" else 1) for name, size in sizes.items()
    )
    return num_blocks, block_size, num_kv_heads, head_size


def whole_number(name: str, value: object, least: int) -> int:
    """The argument `name` as an int; raises unless it is an integer of any type, but bool, and >= `least`.

    >>> whole_number("block_size", 16, least=1)
    16
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__}")
    number = index(value)
    if number < least:
        raise ValueError(f"`{name}` must be >= {least}, got {number}")
    return number
