"""Merge two results of attention, an element an item."""

from .codecs.division import inverse_of
from .parts import index_in_row
from .softmax import LOWEST, NO_SCORE, ZERO, max_f32
from .transcendental import LN_2, LOG2_E, NO_ROW, exp2, log2
from .views import load, store

TYPES = {"value": ("float32", "float16", "bfloat16")}


def merge_states(
    item: "nditem[3]",  # (parts of a head, heads, tokens), tokens rounded up
    out_a: "value[token, head, element]",
    lse_a: "float32[token, head]",
    out_b: "value[token, head, element]",
    lse_b: "float32[token, head]",
    out: "value[token, head, element]",
    lse: "float32[token, head]",
    num_tokens: "int64",
    head_size: "int64",
):
    """The two values, weighted by ``exp(lse_a)`` and ``exp(lse_b)`` relative to the larger one."""
    element = index_in_row(item, head_size)
    head = item.get_global_id(1)
    token = item.get_global_id(2)
    if token < num_tokens:
        a = load(lse_a, token, head)
        b = load(lse_b, token, head)
        largest = max_f32(max_f32(LOWEST, a), b)
        weight_a = exp2((a - largest) * LOG2_E)
        weight_b = exp2((b - largest) * LOG2_E)
        total = weight_a + weight_b
        value = ZERO
        if weight_a != ZERO:
            value = weight_a * load(out_a, token, head, element)
        if weight_b != ZERO:
            value = value + weight_b * load(out_b, token, head, element)
        store(out, value * inverse_of(NO_ROW, total), token, head, element)
        if element == 0:
            state = largest + log2(total) * LN_2 if total > ZERO else NO_SCORE
            store(lse, state, token, head)
