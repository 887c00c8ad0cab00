"""Attention of any sizes and strides, a work-group for a token and head; the same bits on every device."""

import numpy as np

from .codecs import codec_of
from .codecs.division import inverse_of
from .intrinsics import barrier, float_bits, float_from_bits, get_local, put_local
from .parts import own_lane, start_of
from .sequences import query_place, slot_of
from .softmax import LOWEST, NO_SCORE, ZERO, dot, largest_local, max_f32, plus_weighted, score_of, times
from .transcendental import LN_2, LOG2_E, NO_ROW, exp2, log2
from .vectors import each, each_pair
from .views import load, row_from, store

TYPES = {
    "value": ("float32", "float16", "bfloat16"),
    "code": ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"),
}
PARTS = tuple(range(8))
ZEROS = (np.float32(0.0),) * 8


def paged_attention_strided(
    item: "nditem[3]",  # (lanes, query heads, tokens), all lanes of one in a work-group
    query: "value[token, head, element]",
    key_cache: "code[block, offset, head, element]",
    value_cache: "code[block, offset, head, element]",
    block_table: "int32[sequence, column]",
    seq_lens: "int32[sequence]",
    query_start_loc: "int32[sequence]",  # not read unless `listed`
    key_scales: "float32[block, offset, head]",  # not read for caches of values
    value_scales: "float32[block, offset, head]",
    sinks: "float32[head]",  # not read unless `sinking`
    out: "value[token, head, element]",
    lse: "float32[token, head]",  # not written unless `with_lse`
    listed: "int64",
    sinking: "int64",
    with_lse: "int64",
    num_seqs: "int64",
    num_blocks: "int64",
    block_size: "int64",
    capacity: "int64",  # positions that a row of the block table holds
    heads_per_kv_head: "int64",
    head_size: "int64",
    value_head_size: "int64",
    window: "int64",
    scale_bits: "int64",  # of float32 numbers, see `score_of`
    cap_bits: "int64",
    lanes: "int64",  # at least an eighth of a value head, at most half of LOCAL_WORDS
):
    """``softmax(q @ k.T) @ v``, a position a lane, then an eighth of the values a lane, turn by turn."""
    lane = item.get_local_id(0)
    head = item.get_global_id(1)
    token = item.get_global_id(2)
    sequence, position = query_place(query_start_loc, seq_lens, token, num_seqs, listed)
    if sequence >= 0:
        kv_head = np.int64(np.uint32(head) // np.uint32(heads_per_kv_head))
        q = row_from(query, token, head, 0)
        scale = float_from_bits(np.int32(scale_bits))
        cap = float_from_bits(np.int32(cap_bits))
        parts = each(start_of, PARTS, min(lanes, value_head_size), value_head_size)
        own = own_lane(value_cache, lane, value_head_size)
        largest = LOWEST
        total = ZERO
        if sinking != 0:
            sink = load(sinks, head) * LOG2_E
            largest = max_f32(largest, sink)
            total = exp2(sink - largest)
        acc = ZEROS
        last = min(position, capacity - 1)
        first = max(position - window + 1, 0)
        while first <= last:
            score = NO_SCORE
            if first + lane <= last:
                block, offset = slot_of(block_table, sequence, first + lane, block_size, num_blocks)
                if block >= 0:
                    k = row_from(key_cache, block, offset, kv_head, 0)
                    k_scale = codec_of(key_cache).scale_at(key_scales, block, offset, kv_head)
                    score = score_of(dot(q, k, k_scale, head_size), scale, cap)
            put_local(lane, float_bits(score))
            barrier()
            before = largest
            largest = largest_local(lanes, before)
            put_local(lanes + lane, float_bits(exp2(score - largest)))
            barrier()
            total = total * exp2(before - largest)
            acc = each(times, acc, exp2(before - largest))
            for n in range(lanes):
                weight = float_from_bits(get_local(lanes + n))
                if weight != ZERO:  # positions that are not in the cache have none
                    block, offset = slot_of(block_table, sequence, first + n, block_size, num_blocks)
                    v_scale = codec_of(value_cache).scale_at(value_scales, block, offset, kv_head)
                    codes = load(row_from(value_cache, block, offset, kv_head, own), parts)
                    v = each(codec_of(value_cache).value_of, codes, v_scale)
                    acc = each_pair(plus_weighted, acc, v, weight)
                    total = total + weight
            first = first + lanes
        acc = each(times, acc, inverse_of(NO_ROW, total))
        store(row_from(out, token, head, own), acc, parts)
        if with_lse != 0 and lane == 0:
            store(lse, (largest + log2(total)) * LN_2 if total > ZERO else NO_SCORE, token, head)
