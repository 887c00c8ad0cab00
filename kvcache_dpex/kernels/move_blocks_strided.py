"""Move blocks of any strides, a word an item, in up to eight arrays."""

from .blocks import block_shown
from .moves import move_in_array, number_and_array
from .views import load

TYPES = {"word": ("uint8", "uint16", "uint32", "uint64"), "block": ("int32", "int64")}


def move_blocks_strided(
    item: "nditem[3]",  # (items along a row, rows of a block, moves of each array), moves rounded up
    source_ids: "block[n]",  # outside [0, num_sources) the target gets zeros
    target_0: "word[block, outer, row, element]",
    target_ids: "block[n]",  # not read unless `listed`; outside [0, num_targets) nothing is written
    target_1: "word[block, outer, row, element]",
    target_2: "word[block, outer, row, element]",
    target_3: "word[block, outer, row, element]",
    target_4: "word[block, outer, row, element]",
    target_5: "word[block, outer, row, element]",
    target_6: "word[block, outer, row, element]",
    target_7: "word[block, outer, row, element]",
    source_0: "word[block, outer, row, element]",
    source_1: "word[block, outer, row, element]",
    source_2: "word[block, outer, row, element]",
    source_3: "word[block, outer, row, element]",
    source_4: "word[block, outer, row, element]",
    source_5: "word[block, outer, row, element]",
    source_6: "word[block, outer, row, element]",
    source_7: "word[block, outer, row, element]",
    listed: "int64",
    num_moves: "int64",
    num_arrays: "int64",  # of the eight; num_moves * num_arrays is below 2**32
    num_sources: "int64",
    num_targets: "int64",
    outers: "int64",
    size: "int64",  # of a row
    items: "int64",  # along a row, those of the whole launch
):
    """Block ``target_ids[n]`` of each target becomes block ``source_ids[n]`` of its source."""
    slow = item.get_global_id(2)
    if slow < num_moves * num_arrays:
        n, array = number_and_array(slow, num_arrays)
        at = load(source_ids, n)
        to = block_shown(target_ids, n, listed)
        if 0 <= to < num_targets:
            targets = (target_0, target_1, target_2, target_3, target_4, target_5, target_6, target_7)
            sources = (source_0, source_1, source_2, source_3, source_4, source_5, source_6, source_7)
            known = 0 <= at < num_sources
            move_in_array(item, array, targets, sources, to, at, known, outers, size, items)
