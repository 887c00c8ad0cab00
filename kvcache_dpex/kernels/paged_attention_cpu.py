"""Attention on CPU devices: 16 lanes, one work-group, read a part of a context once, for all heads."""

import numpy as np

from .codecs import codec_of
from .codecs.division import scaled
from .intrinsics import float_from_bits, from_lane, lanes_max, lanes_sum
from .sequences import part_of, query_place, slot_of
from .softmax import LOWEST, NO_SCORE, ZERO, max_f32, plus_weighted, plus_where_weighted, score_of
from .transcendental import ONE, exp2
from .vectors import each, each_pair, run_through
from .views import load, store

IN_RECORD = True
TYPES = {
    "value": ("float32", "float16", "bfloat16"),
    "code": ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"),
}
LANES = 16
FOUR = tuple(range(4))
EIGHT = tuple(range(8))
NO_SUMS = (np.float32(0.0),) * 4


def row_of(number, slot, first, count):
    """The slot of row ``first + number`` of a turn, or of its last row."""
    return slot + min(first + number, count - 1)


def weight_of(number, weight, first):
    return from_lane(weight, first + number)


def value_at(slot, cache, head, element):
    """An element of a row, without the row's scale."""
    return codec_of(cache).value_of(load(cache, slot, head, element), ONE)


def products(query, token, head, key_cache, kv_head, slot, count, lane, size):
    """``q @ k`` for the rows of a turn, in each lane that of its row."""
    product = ZERO
    for first in range(0, count, 4):
        rows = each(row_of, FOUR, slot, first, count)
        sums = NO_SUMS
        for start in range(0, size, LANES):
            k = each(value_at, rows, key_cache, kv_head, start + lane)
            sums = each_pair(plus_weighted, sums, k, load(query, token, head, start + lane))
        a, b, c, d = each(lanes_sum, sums)
        product = a if lane == first else product
        product = b if lane == first + 1 else product
        product = c if lane == first + 2 else product
        product = d if lane == first + 3 else product
    return product


def add_values(parts, part, head, shrink, weight, value_cache, kv_head, slot, count, lane, size):
    """The sums of a head, times `shrink`, plus the values of a turn's rows, times the lanes' weights."""
    for first in range(0, count, 8):
        rows = each(row_of, EIGHT, slot, first, count)
        weights = each(weight_of, EIGHT, weight, first)
        factor = shrink if first == 0 else ONE
        for start in range(0, size, LANES):
            acc = load(parts, part, head, start + lane) * factor
            v = each(value_at, rows, value_cache, kv_head, start + lane)
            if first + 8 <= count:
                acc = run_through(plus_weighted, acc, v, weights)
            else:  # some rows are the last one again, with weight 0
                acc = run_through(plus_where_weighted, acc, v, weights)
            store(parts, acc, part, head, start + lane)


def paged_attention_cpu(
    item: "nditem[3]",  # (LANES, parts of a context, tokens)
    query: "value[token, head, element=1]",
    key_cache: "code[slot, head, element=1]",
    value_cache: "code[slot, head, element=1]",
    block_table: "int32[sequence, column]",
    seq_lens: "int32[sequence]",
    query_start_loc: "int32[sequence]",  # not read unless `listed`
    key_scales: "float32[slot, offset, head]",  # not read for caches of values; offset is 0
    value_scales: "float32[slot, offset, head]",
    parts: "float32[part, head, element=1]",  # sums of values, then of weights by lanes, then largest scores
    listed: "int64",
    num_seqs: "int64",
    num_blocks: "int64",
    block_size: "int64",
    capacity: "int64",
    num_kv_heads: "int64",
    heads_per_kv_head: "int64",
    head_size: "int64",  # a multiple of LANES, like value_head_size
    value_head_size: "int64",
    window: "int64",
    scale_bits: "int64",
    cap_bits: "int64",
    splits: "int64",
    first_token: "int64",
):
    """An online softmax over part `split` of each token's context, without its division by the weights."""
    lane = item.get_local_id(0)
    split = item.get_global_id(1)
    token = first_token + item.get_global_id(2)
    part = item.get_global_id(2) * splits + split
    sums_at = value_head_size + lane
    largest_at = value_head_size + LANES + lane
    for head in range(num_kv_heads * heads_per_kv_head):
        for start in range(0, value_head_size + LANES, LANES):
            store(parts, ZERO, part, head, start + lane)
        store(parts, LOWEST, part, head, largest_at)
    sequence, position = query_place(query_start_loc, seq_lens, token, num_seqs, listed)
    if sequence >= 0:
        scale = float_from_bits(np.int32(scale_bits))
        cap = float_from_bits(np.int32(cap_bits))
        first, end = part_of(max(position - window + 1, 0), min(position + 1, capacity), split, splits, LANES)
        while first < end:
            block, offset = slot_of(block_table, sequence, first, block_size, num_blocks)
            count = min(LANES, block_size - offset, end - first)
            slot = block * block_size + offset
            own = slot + min(lane, count - 1)
            for head in range(num_kv_heads * heads_per_kv_head if block >= 0 else 0):
                kv_head = np.int64(np.uint32(head) // np.uint32(heads_per_kv_head))
                k_scale = codec_of(key_cache).scale_at(key_scales, own, 0, kv_head)
                v_scale = codec_of(value_cache).scale_at(value_scales, own, 0, kv_head)
                product = products(query, token, head, key_cache, kv_head, slot, count, lane, head_size)
                score = score_of(scaled(product, k_scale), scale, cap) if lane < count else NO_SCORE
                before = load(parts, part, head, largest_at)
                largest = max_f32(before, lanes_max(max_f32(LOWEST, score)))
                shrink = exp2(before - largest)
                weight = exp2(score - largest)
                store(parts, load(parts, part, head, sums_at) * shrink + weight, part, head, sums_at)
                store(parts, largest, part, head, largest_at)
                weight = scaled(weight, v_scale) if weight != ZERO else ZERO
                add_values(
                    parts,
                    part,
                    head,
                    shrink,
                    weight,
                    value_cache,
                    kv_head,
                    slot,
                    count,
                    lane,
                    value_head_size,
                )
            first = first + count
