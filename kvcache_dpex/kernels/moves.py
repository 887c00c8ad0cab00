"""Moves of blocks: which of a launch's arrays an item moves a row of, and the copy of that row."""

import numpy as np

from .views import load, row_from, store, store_zero


def number_and_array(slow, num_arrays):
    """Which move, and which of the arrays, number `slow` of all is."""
    n = np.int64(np.uint32(slow) // np.uint32(num_arrays))
    return n, slow - n * num_arrays


def move_in_array(item, array, targets, sources, to, at, known, outers, size, items):
    """Move a block in the array of this number."""
    if array == 0:
        move_row(item, targets[0], sources[0], to, at, known, outers, size, items)
    elif array == 1:
        move_row(item, targets[1], sources[1], to, at, known, outers, size, items)
    elif array == 2:
        move_row(item, targets[2], sources[2], to, at, known, outers, size, items)
    elif array == 3:
        move_row(item, targets[3], sources[3], to, at, known, outers, size, items)
    elif array == 4:
        move_row(item, targets[4], sources[4], to, at, known, outers, size, items)
    elif array == 5:
        move_row(item, targets[5], sources[5], to, at, known, outers, size, items)
    elif array == 6:
        move_row(item, targets[6], sources[6], to, at, known, outers, size, items)
    elif array == 7:
        move_row(item, targets[7], sources[7], to, at, known, outers, size, items)


def move_row(item, target, source, to, at, known, outers, size, items):
    """Copy the item's part of a row, for each of the block's `outers`; store zeros without a source block."""
    row = item.get_global_id(1)
    for outer in range(outers):
        if known:
            copy_row(
                item, row_from(target, to, outer, row, 0), row_from(source, at, outer, row, 0), size, items
            )
        else:
            clear_row(item, row_from(target, to, outer, row, 0), size, items)


def copy_row(item, target, source, size, items):
    """Copy the item's elements of a row; the last part ends with the row."""
    lane = item.get_local_id(0)
    last = size - item.get_local_range(0)
    start = item.get_global_id(0) - lane
    while start < size:
        element = min(start, last) + lane
        store(target, load(source, element), element)
        start += items


def clear_row(item, target, size, items):
    """Store zeros where `copy_row` would copy."""
    lane = item.get_local_id(0)
    last = size - item.get_local_range(0)
    start = item.get_global_id(0) - lane
    while start < size:
        store_zero(target, min(start, last) + lane)
        start += items
