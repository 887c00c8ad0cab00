"""Rows: written, quantized, decoded and attended to."""

from __future__ import annotations

import numpy as np

from .codes import quantize_row, quantize_row_fp8, scales_of_rows, to_e4m3, to_e5m2, values_of


def empty_cache(num_blocks, block_size, num_kv_heads, head_size, *, dtype="float32"):
    """Two caches of zeros, ``[num_blocks, block_size, num_kv_heads, head_size]``."""
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return np.zeros(shape, dtype), np.zeros(shape, dtype)


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping):
    """Copy row ``token`` of key and value to slot ``slot_mapping[token]``; other slots stay as they are."""
    num_blocks, block_size = key_cache.shape[:2]
    for token, slot in enumerate(slot_mapping):
        if 0 <= slot < num_blocks * block_size:
            block, offset = divmod(int(slot), block_size)
            key_cache[block, offset] = key[token]
            value_cache[block, offset] = value[token]


def empty_quant_cache(num_blocks, block_size, num_kv_heads, head_size, *, format="int8_per_token_head"):
    """Two caches of codes and their scales ``[num_blocks * block_size, num_kv_heads]``, all zero."""
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    scales = (num_blocks * block_size, num_kv_heads)
    codes = "uint8" if format == "fp8_per_token_head" else "int8"
    return np.zeros(shape, codes), np.zeros(shape, codes), np.zeros(scales, "f4"), np.zeros(scales, "f4")


def reshape_and_cache_quant(key, value, kq, vq, ks, vs, slot_mapping, *, dtype=None, format=None):
    """Quantize row ``token``, head by head, into slot ``slot_mapping[token]``; other slots stay."""
    num_blocks, block_size = kq.shape[:2]
    quantize = quantize_row_fp8 if format == "fp8_per_token_head" else quantize_row
    for rows, codes, scales in ((key, kq, ks), (value, vq, vs)):
        scales = scales.reshape(codes.shape[:3]) if scales.ndim == 2 else scales
        for token, slot in enumerate(slot_mapping):
            if 0 <= slot < num_blocks * block_size:
                block, offset = divmod(int(slot), block_size)
                for head, row in enumerate(as_float32(rows[token], dtype)):
                    codes[block, offset, head], scales[block, offset, head] = quantize(row)


def reshape_and_cache_fp8(
    key, value, key_cache, value_cache, k_scale, v_scale, slot_mapping, *, dtype=None, format="fp8_e4m3"
):
    """Row ``token`` as codes ``fp8(x / scale)`` to slot ``slot_mapping[token]``; other slots stay."""
    num_blocks, block_size, num_kv_heads = key_cache.shape[:3]
    to_code = to_e5m2 if format == "fp8_e5m2" else to_e4m3
    for rows, codes, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        good = (scale >= 2.0**-126) & (scale < 2.0**127)
        scales = np.broadcast_to(np.where(good, scale, np.float32(np.nan)), num_kv_heads)[:, None]
        for token, slot in enumerate(slot_mapping):
            if 0 <= slot < num_blocks * block_size:
                block, offset = divmod(int(slot), block_size)
                codes[block, offset] = to_code(as_float32(rows[token], dtype) / scales)


def dequant_cache(q, scales, *, dtype="float32", blocks=None, format=None):
    """``float32(code) * scale``, rounded once to `dtype`; NaN where the scale is not finite.

    With `blocks`, result block ``n`` shows block ``blocks[n]``, or zeros where there is no such block.
    """
    scales = scales_of_rows(scales, q.shape[:3])
    chosen = np.arange(q.shape[0]) if blocks is None else np.asarray(blocks)
    out = np.zeros((*chosen.shape, *q.shape[1:]), "f4")
    for n, block in np.ndenumerate(chosen):
        if 0 <= block < q.shape[0]:
            scale = np.where(np.isfinite(scales[block]), scales[block], np.float32(np.nan))
            out[n] = values_of(q[block], format) * scale[:, :, None]
    return from_float32(out, dtype)


def as_float32(array, dtype=None):
    """Values as float32; of uint16 arrays, which hold bits, `dtype` says "bfloat16"."""
    if str(dtype) == "bfloat16":
        return (array.astype("u4") << 16).view("f4")
    return array.astype("f4")


def from_float32(array, dtype):
    """Values rounded to `dtype`, to nearest even; "bfloat16" gives the bits as uint16."""
    if str(dtype) != "bfloat16":
        with np.errstate(over="ignore"):
            return array.astype(dtype)
    bits = np.ascontiguousarray(array).view("u4")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(array), bits >> 16, rounded).astype("u2")


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    *,
    query_start_loc=None,
    key_scales=None,
    value_scales=None,
    scale=None,
    sliding_window=None,
    soft_cap=None,
    sinks=None,
    dtype=None,
    format=None,
    out=None,
    lse=None,
):
    """Attention of each query token to the tokens of its sequence that precede it, in float64.

    Returns `out` and `lse`, float64 unless given; rows that belong to no sequence stay as they are.
    """
    num_tokens, num_q_heads, head_size = query.shape
    num_kv_heads, value_head_size = value_cache.shape[2:]
    out = np.zeros((num_tokens, num_q_heads, value_head_size)) if out is None else out
    lse = np.full((num_tokens, num_q_heads), -np.inf) if lse is None else lse
    scale = head_size**-0.5 if scale is None else scale
    starts = np.arange(len(seq_lens) + 1) if query_start_loc is None else query_start_loc
    q = as_float32(query, dtype if query.dtype == np.uint16 else None).astype("f8")
    for sequence, seq_len in enumerate(seq_lens):
        first, end = starts[sequence], starts[sequence + 1]
        for token in range(max(first, 0), min(end, num_tokens)):
            position = seq_len - end + token  # the last token of a sequence is its newest
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = visible_slots(block_table[sequence], range(oldest, position + 1), key_cache.shape)
            for head in range(num_q_heads):
                kv_head = head // (num_q_heads // num_kv_heads)
                keys = cached_rows(key_cache, key_scales, seen, kv_head, dtype, format)
                values = cached_rows(value_cache, value_scales, seen, kv_head, dtype, format)
                scores = keys @ q[token, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                sink = -np.inf if sinks is None else np.float64(sinks[head])
                out[token, head], lse[token, head] = softmax_sum(scores, values, sink)
    return out, lse


def visible_slots(blocks, positions, cache_shape):
    """(block, offset) of each position; without those whose block the table or the cache does not have."""
    num_blocks, block_size = cache_shape[:2]
    places = [divmod(position, block_size) for position in positions]
    found = [(blocks[column], offset) for column, offset in places if column < len(blocks)]
    return [(block, offset) for block, offset in found if 0 <= block < num_blocks]


def cached_rows(cache, scales, slots, head, dtype=None, format=None):
    """Rows of one head as float64, ``[num_slots, head_size]``; codes times their scales."""
    rows = np.zeros((len(slots), cache.shape[3]))
    for n, (block, offset) in enumerate(slots):
        row = cache[block, offset, head]
        if scales is None:
            row = as_float32(row, dtype if cache.dtype == np.uint16 else None)
        else:
            row = values_of(row, format)
            scale = scales_of_rows(scales, cache.shape[:3])[block, offset, head]
            row = row * np.float32(scale if np.isfinite(scale) else np.nan)
        rows[n] = row
    return rows


def softmax_sum(scores, values, sink=-np.inf):
    """``softmax(scores) @ values`` and the logarithm of the softmax's denominator.

    `sink` is a further score, without a value. A score of -inf is none; without any score the sum is zero.
    """
    values, scores = values[scores != -np.inf], scores[scores != -np.inf]
    largest = np.max(scores, initial=sink)
    if largest == -np.inf:
        return np.zeros(values.shape[1]), -np.inf
    weights = np.exp(scores - largest)
    denominator = weights.sum() + np.exp(sink - largest)
    return weights @ values / denominator, largest + np.log(denominator)


def merge_attention_states(out_a, lse_a, out_b, lse_b, *, dtype=None):
    """Attention to two disjoint sets of tokens, made of the results for each, in float64."""
    largest = np.maximum(lse_a, lse_b).astype("f8")
    shift = np.where(largest == -np.inf, 0, largest)
    a, b = np.exp(lse_a - shift), np.exp(lse_b - shift)
    total = a + b
    out = np.zeros(out_a.shape)
    for weight, values in ((a, out_a), (b, out_b)):
        values = values if dtype is None else as_float32(values, dtype)
        out += np.where(weight[..., None] == 0, 0, weight[..., None] * values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total[..., None] == 0, 0, out / total[..., None]), shift + np.log(total)
