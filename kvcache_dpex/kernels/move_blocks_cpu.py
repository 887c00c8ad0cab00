"""Move blocks whose rows are contiguous; neighbouring items copy neighbouring words."""

from .blocks import block_shown
from .moves import move_in_array, number_and_array
from .views import load

TYPES = {"block": ("int32", "int64")}
IN_RECORD = True


def move_blocks_cpu(
    item: "nditem[3]",  # (items along a row, rows of a block, moves of each array), moves rounded up
    source_ids: "block[n]",  # outside [0, num_sources) the target gets zeros
    target_0: "uint64[block, outer, row, word=1]",
    target_ids: "block[n]",  # not read unless `listed`; outside [0, num_targets) nothing is written
    target_1: "uint64[block, outer, row, word=1]",
    target_2: "uint64[block, outer, row, word=1]",
    target_3: "uint64[block, outer, row, word=1]",
    target_4: "uint64[block, outer, row, word=1]",
    target_5: "uint64[block, outer, row, word=1]",
    target_6: "uint64[block, outer, row, word=1]",
    target_7: "uint64[block, outer, row, word=1]",
    source_0: "uint64[block, outer, row, word=1]",
    source_1: "uint64[block, outer, row, word=1]",
    source_2: "uint64[block, outer, row, word=1]",
    source_3: "uint64[block, outer, row, word=1]",
    source_4: "uint64[block, outer, row, word=1]",
    source_5: "uint64[block, outer, row, word=1]",
    source_6: "uint64[block, outer, row, word=1]",
    source_7: "uint64[block, outer, row, word=1]",
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
