"""Combine the parts of an online softmax that `paged_attention_cpu` leaves, an element an item."""

import numpy as np

from .codecs.division import inverse_of
from .parts import index_in_row
from .sequences import query_place
from .softmax import LOWEST, NO_SCORE, ZERO, max_f32
from .transcendental import LN_2, LOG2_E, NO_ROW, exp2, log2
from .views import load, store

IN_RECORD = True
TYPES = {"value": ("float32", "float16", "bfloat16")}
LANES = 16


def combine_parts(
    item: "nditem[3]",  # (parts of a head, heads, tokens), tokens rounded up
    seq_lens: "int32[sequence]",
    query_start_loc: "int32[sequence]",  # not read unless `listed`
    sinks: "float32[head]",  # not read unless `sinking`
    out: "value[token, head, element]",
    lse: "float32[token, head]",  # not written unless `with_lse`
    parts: "float32[part, head, element=1]",
    listed: "int64",
    sinking: "int64",
    with_lse: "int64",
    num_seqs: "int64",
    num_tokens: "int64",
    head_size: "int64",
    splits: "int64",
    first_token: "int64",
):
    """The sums of values of all parts over those of their weights, relative to the largest score."""
    element = index_in_row(item, head_size)
    head = item.get_global_id(1)
    row = item.get_global_id(2)
    token = first_token + row
    sequence = np.int64(-1)
    if row < num_tokens:
        sequence, _ = query_place(query_start_loc, seq_lens, token, num_seqs, listed)
    if sequence >= 0:
        largest = LOWEST
        sink = NO_SCORE
        if sinking != 0:
            sink = load(sinks, head) * LOG2_E
            largest = max_f32(largest, sink)
        for part in range(row * splits, (row + 1) * splits):
            largest = max_f32(largest, load(parts, part, head, head_size + LANES))
        total = exp2(sink - largest)
        value = ZERO
        for part in range(row * splits, (row + 1) * splits):
            weight = exp2(load(parts, part, head, head_size + LANES) - largest)
            value = value + load(parts, part, head, element) * weight
            for lane in range(LANES):
                total = total + load(parts, part, head, head_size + lane) * weight
        store(out, value * inverse_of(NO_ROW, total), token, head, element)
        if with_lse != 0 and element == 0:
            store(lse, (largest + log2(total)) * LN_2 if total > ZERO else NO_SCORE, token, head)
