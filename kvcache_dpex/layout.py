"""Where a row lives: slots, blocks, shapes and strides, in plain integers.

A cache is ``[num_blocks, block_size, num_kv_heads, head_size]`` (NHD). Slot ``s`` is offset
``s % block_size`` of block ``s // block_size``, and its element ``(h, d)`` is element
``(s * num_kv_heads + h) * head_size + d`` of a contiguous cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import NamedTuple


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

    Entries of `block_table` may be integers of any width; slots are Python integers. A negative entry is a
    block that is no longer kept: its tokens have slot -1.

    >>> slots_of_sequence([7, 2], start=14, stop=18, block_size=16)
    [126, 127, 32, 33]
    >>> slots_of_sequence([-1, 2], start=14, stop=18, block_size=16)
    [-1, -1, 32, 33]
    """
    if not 0 <= start <= stop:
        raise ValueError(f"`start` and `stop` must be positions 0 <= start <= stop, got {start} and {stop}")
    if stop > len(block_table) * block_size:
        raise ValueError(
            f"`block_table` holds {len(block_table)} blocks of {block_size}, so `stop` must be "
            f"<= {len(block_table) * block_size}, got {stop}; append a block to the table first"
        )
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


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """First byte and end of an array's memory, in bytes from its element 0; strides count elements.

    >>> extent((4, 8), (-8, 1), itemsize=4)
    (-96, 32)
    """
    if 0 in shape:
        return 0, 0
    steps = [(size - 1) * stride for size, stride in zip(shape, strides)]
    low = sum(step for step in steps if step < 0)
    high = sum(step for step in steps if step > 0)
    return low * itemsize, (high + 1) * itemsize


class Span(NamedTuple):
    """The memory of an array: shape, strides in elements, and bytes of an element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def are_disjoint(first: Span, second: Span, distance: int) -> bool:
    """Whether two arrays provably share no byte; False where that is not proven.

    Element 0 of `second` is `distance` bytes after that of `first`. They are disjoint where their ranges are,
    and also where both are periodic and apart in every period: each step is below the period or a multiple of
    it, so that each array occupies one interval of every period.

    >>> keys = Span((4, 16, 128), (4096, 256, 1), 4)  # keys and values packed in one row
    >>> are_disjoint(keys, keys, 512), are_disjoint(keys, keys, 256)
    (True, False)
    """
    if 0 in first.shape or 0 in second.shape:
        return True
    (low, high), (other_low, other_high) = extent(*first), extent(*second)
    if high <= distance + other_low or distance + other_high <= low:
        return True
    periods = {abs(stride) * span.itemsize for span in (first, second) for stride in span.strides} - {0}
    return any(_apart(first, second, distance, period) for period in periods)


def _apart(first: Span, second: Span, distance: int, period: int) -> bool:
    """Whether each array occupies one interval of every period, and the two intervals do not meet."""
    intervals = []
    for span, start in ((first, 0), (second, distance)):
        length = span.itemsize
        for size, stride in zip(span.shape, span.strides):
            step = abs(stride) * span.itemsize
            if size == 1 or step == 0:
                continue
            if step < period:
                length += (size - 1) * step
            elif step % period:
                return False
            start += min(0, (size - 1) * stride * span.itemsize)
        intervals.append((start, length))
    (start, length), (other_start, other_length) = intervals
    gap = (other_start - start) % period
    return length <= gap and gap + other_length <= period


def cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, value_head_size: int | None = None
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Shapes of a key cache and a value cache; raises where a size is no whole number or is out of range.

    >>> cache_shapes(256, 16, 8, 192, value_head_size=128)
    ((256, 16, 8, 192), (256, 16, 8, 128))
    """
    __tracebackhide__ = True
    sizes = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "value_head_size": head_size if value_head_size is None else value_head_size,
    }
    for name, size in sizes.items():
        sizes[name] = whole_number(name, size, least=0 if name == "num_blocks" else 1)
    num_blocks, block_size, num_kv_heads, of_keys, of_values = sizes.values()
    return (num_blocks, block_size, num_kv_heads, of_keys), (num_blocks, block_size, num_kv_heads, of_values)


def inline_spans(
    of_keys: tuple[int, int, int, int], of_values: tuple[int, int, int, int], order: str
) -> tuple[int, tuple[tuple[Span, int], ...]]:
    """Rows ``[K codes | float32 | V codes | float32]`` of bytes, for each token and head, in one allocation.

    Rows of a block are in `order` ``"NHD"``, all heads of a token side by side, or ``"HND"``, all tokens of a
    head. Gives the bytes of a block, and the span and first element of the codes of keys, those of values,
    the scales of keys and those of values.

    >>> size, spans = inline_spans((4, 16, 8, 128), (4, 16, 8, 128), "NHD")
    >>> size // (16 * 8), [first * span.itemsize for span, first in spans]
    (264, [0, 132, 128, 260])
    """
    if order not in ("NHD", "HND"):
        raise ValueError(f"`inline` must be 'NHD', 'HND' or None, got {order!r}")
    _, block_size, num_kv_heads, key_size = of_keys
    value_size = of_values[3]
    for name, size in (("head_size", key_size), ("value_head_size", value_size)):
        if size % 4:
            raise ValueError(f"`{name}` must be a multiple of 4 where scales are inline, got {size}")
    row = key_size + value_size + 8
    per_token, per_head = (num_kv_heads * row, row) if order == "NHD" else (row, block_size * row)
    steps = block_size * num_kv_heads * row, per_token, per_head

    def codes(first: int, size: int) -> tuple[Span, int]:
        return Span((*of_keys[:3], size), (*steps, 1), 1), first

    def scales(first: int) -> tuple[Span, int]:
        return Span(of_keys[:3], tuple(step // 4 for step in steps), 4), first // 4

    spans = codes(0, key_size), codes(key_size + 4, value_size), scales(key_size), scales(row - 4)
    return steps[0], spans


def whole_number(name: str, value: object, least: int) -> int:
    """The argument `name` as an int; raises unless it is an integer of any type, but bool, and >= `least`.

    >>> whole_number("block_size", 16, least=1)
    16
    """
    __tracebackhide__ = True
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__}")
    number = index(value)
    if number < least:
        raise ValueError(f"`{name}` must be >= {least}, got {number}")
    return number
