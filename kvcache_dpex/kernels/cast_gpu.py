"""Rows as codes, divided by a scale that is given: two eights of values a lane."""

from .codecs import codec_of
from .views import load, store

TYPES = {
    "value": ("float32", "float16", "bfloat16"),
    "code": ("float8_e4m3fn", "float8_e5m2"),
    "slot": ("int32", "int64"),
}


def cast_gpu(
    item: "nditem[3]",  # (lanes of a head, heads, tokens), all three within a work-group, rounded up
    key: "value*8[token, head, eight=1]",
    value: "value*8[token, head, eight=1]",
    key_codes: "code*8[slot, head, eight=1]",
    value_codes: "code*8[slot, head, eight=1]",
    key_scales: "float32[slot, head]",
    value_scales: "float32[slot, head]",
    slot_mapping: "slot[token]",  # outside [0, num_slots) the token is skipped
    num_tokens: "int64",
    num_kv_heads: "int64",
    num_slots: "int64",
    lanes: "int64",
):
    """Codes of row `token`, head by head, go to slot ``slot_mapping[token]``."""
    lane = item.get_local_id(0)
    head = item.get_global_id(1)
    token = item.get_global_id(2)
    if head < num_kv_heads and token < num_tokens:
        slot = load(slot_mapping, token)
        k = load(key, token, head, lane) + load(key, token, head, lane + lanes)
        v = load(value, token, head, lane) + load(value, token, head, lane + lanes)
        if 0 <= slot < num_slots:
            codec = codec_of(key_codes)
            codes = codec.codes_by(k, load(key_scales, slot, head))
            store(key_codes, codes[:8], slot, head, lane)
            store(key_codes, codes[8:], slot, head, lane + lanes)
            codes = codec.codes_by(v, load(value_scales, slot, head))
            store(value_codes, codes[:8], slot, head, lane)
            store(value_codes, codes[8:], slot, head, lane + lanes)
