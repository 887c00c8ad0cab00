"""The oracle: every public operation again, on NumPy arrays, in loops that a reader believes at once.

Same names, same argument order, same in-place semantics as the package's operations. Where slots
repeat, the last row wins here; the device leaves the winner open.
"""

from __future__ import annotations

import numpy as np


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


def quantize_row(row):
    """Codes and scale of one float32 row: ``scale = absmax / 127``, ``code = clamp(rint(x / scale))``."""
    zeros = np.zeros(row.shape, "int8")
    absmax = np.max(np.abs(row), initial=np.float32(0))
    if np.isnan(absmax):
        return zeros, np.float32(np.nan)
    scale = absmax / np.float32(127)
    if scale == 0 or np.isinf(scale):
        return zeros, scale
    return np.clip(np.rint(row / scale), -127, 127).astype("int8"), scale


def quantize_row_fp8(row):
    """Codes and scale of one float32 row: ``scale = absmax / 448``, ``code = e4m3(x / scale)``."""
    zeros = np.zeros(row.shape, "uint8")
    absmax = np.max(np.abs(row), initial=np.float32(0))
    if np.isnan(absmax):
        return zeros, np.float32(np.nan)
    scale = absmax / np.float32(448)
    if scale == 0 or np.isinf(scale):
        return zeros, scale
    # The code of -0 is that of 0.
    return to_e4m3(np.where(row == 0, 0, row / scale)), scale


def e4m3_values():
    """What the 128 codes without a sign mean: 4 bits of exponent, 3 of mantissa, and NaN as the last."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    small, large = mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10)
    values = np.where(exponent == 0, small, large).astype("f4")
    values[127] = np.nan
    return values


def to_e4m3(x):
    """The nearest float8_e4m3fn of float32 values, ties to even, at most 448 in magnitude, as its bits."""
    values = e4m3_values()[:127]
    between = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x)
    code = np.searchsorted(between, magnitude)  # a value that lies between two codes gives the lower
    tie = magnitude == between[np.minimum(code, 125)]
    code = np.where(np.isnan(x), 127, code + (tie & (code % 2 == 1)))
    return (code | np.signbit(x) * 0x80).astype("uint8")


def from_e4m3(codes):
    """The float32 values of float8_e4m3fn bits."""
    values = e4m3_values()[codes & 0x7F]
    return np.where((codes >= 0x80) & ~np.isnan(values), -values, values)


def dequant_cache(q, scales, *, dtype="float32", blocks=None, format=None):
    """``float32(code) * scale``, rounded once to `dtype`; NaN where the scale is not finite.

    With `blocks`, result block ``n`` shows block ``blocks[n]``, or zeros where there is no such block.
    """
    scales = scales.reshape(q.shape[:3])
    chosen = np.arange(q.shape[0]) if blocks is None else np.asarray(blocks)
    out = np.zeros((*chosen.shape, *q.shape[1:]), "f4")
    for n, block in np.ndenumerate(chosen):
        if 0 <= block < q.shape[0]:
            scale = np.where(np.isfinite(scales[block]), scales[block], np.float32(np.nan))
            values = from_e4m3(q[block]) if format == "fp8_per_token_head" else q[block].astype("f4")
            out[n] = values * scale[:, :, None]
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
        if format == "fp8_per_token_head":
            row = from_e4m3(row)
        else:
            row = as_float32(row, dtype if cache.dtype == np.uint16 else None)
        if scales is not None:
            scale = scales.reshape(cache.shape[:3])[block, offset, head]
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


def move_blocks(source_ids, target_0, target_ids=None, *, num_sources=None, num_targets=None, **others):
    """Block ``target_ids[n]`` of each target becomes block ``source_ids[n]`` of its source, or zeros."""
    arrays = {"target_0": target_0, **others}
    target_ids = range(len(source_ids)) if target_ids is None else target_ids
    for number in range(8):
        if f"target_{number}" in arrays:
            target = arrays[f"target_{number}"]
            source = arrays.get(f"source_{number}", target[:0])
            to_blocks, from_blocks = block_slices(target, num_targets), block_slices(source, num_sources)
            for at, to in zip(source_ids, target_ids):
                if 0 <= to < len(to_blocks):
                    known = 0 <= at < len(from_blocks)
                    target[to_blocks[to]] = source[from_blocks[at]] if known else 0


def block_slices(array, num_blocks=None):
    """What each block is of an array's first axis, which counts blocks or slots."""
    num_blocks = len(array) if num_blocks is None else num_blocks
    rows = len(array) // max(num_blocks, 1)
    return [slice(block * rows, (block + 1) * rows) for block in range(num_blocks)]


def copy_blocks(caches, pairs):
    """Copy blocks (source, target) one after the other; scales ``[num_slots, num_kv_heads]`` go along."""
    swap_blocks(caches, caches, pairs)


def swap_blocks(sources, targets, pairs):
    """Copy blocks (source, target) of one pool to another, one after the other."""
    from_count, to_count = (next(len(each) for each in pool if each.ndim > 2) for pool in (sources, targets))
    for source, target in zip(sources, targets):
        from_blocks, to_blocks = block_slices(source, from_count), block_slices(target, to_count)
        for at, to in pairs:
            target[to_blocks[to]] = source[from_blocks[at]].copy()


def zero_blocks(caches, block_ids):
    """Fill blocks with zeros."""
    num_blocks = next(len(each) for each in caches if each.ndim > 2)
    for each in caches:
        for block in block_ids:
            each[block_slices(each, num_blocks)[block]] = 0


def gather_blocks(cache, blocks):
    """The listed blocks as one array; zeros where there is no such block."""
    blocks = np.asarray(blocks)
    out = np.zeros((*blocks.shape, *cache.shape[1:]), cache.dtype)
    for n, block in np.ndenumerate(blocks):
        if 0 <= block < len(cache):
            out[n] = cache[block]
    return out


def slot_mapping(
    block_table,
    positions,
    block_size,
    *,
    batch_indices=None,
    query_start_loc=None,
    seq_lens=None,
    kv_indptr=None,
    window=None,
    num_sinks=0,
):
    """The slot of each token; -1 for padding and wherever the table has no block."""
    num_seqs = len(block_table) if kv_indptr is None else len(kv_indptr) - 1
    found = np.full(len(positions), -1, "i8")
    for token, position in enumerate(map(int, positions)):
        sequence = token if batch_indices is None else int(batch_indices[token])
        if query_start_loc is not None:
            sequence = next(
                (n for n in range(num_seqs) if query_start_loc[n] <= token < query_start_loc[n + 1]), -1
            )
        if not 0 <= sequence < num_seqs or not 0 <= position < 2**32:
            continue
        blocks = block_table[sequence] if kv_indptr is None else row_of(block_table, kv_indptr, sequence)
        if window is not None and position >= num_sinks:
            if seq_lens is not None and position + window < seq_lens[sequence]:
                continue
            position = num_sinks + (position - num_sinks) % window
        column, offset = divmod(position, block_size)
        if column < len(blocks) and blocks[column] >= 0:
            found[token] = int(blocks[column]) * block_size + offset
    return found


def row_of(kv_indices, kv_indptr, sequence):
    """The blocks of a sequence in a table of one row."""
    return kv_indices[kv_indptr[sequence] : kv_indptr[sequence + 1]]


def get_batch_indices_positions(append_indptr, seq_lens, nnz):
    """The sequence of each token and its position there; -1 and -1 for padding."""
    indices, positions = np.full((2, nnz), -1, append_indptr.dtype)
    for sequence, seq_len in enumerate(seq_lens):
        start, end = append_indptr[sequence], append_indptr[sequence + 1]
        for token in range(start, min(end, nnz)):
            indices[token], positions[token] = sequence, seq_len - end + token
    return indices, positions


def rotary_and_cache(
    positions,
    query,
    key,
    value,
    cos_sin_cache,
    key_cache,
    value_cache,
    slot_mapping,
    *,
    interleaved=False,
    dtype=None,
):
    """Rotate `query` and `key` in place, then write key and value; not for tokens of unknown positions."""
    known = [token for token, position in enumerate(positions) if 0 <= position < len(cos_sin_cache)]
    for token in known:
        cos, sin = np.split(cos_sin_cache[positions[token]], 2)
        for rows in (query, key):
            rows[token] = rotated(rows[token], cos, sin, interleaved, dtype)
    for token in known:
        slots = slot_mapping[token : token + 1]
        reshape_and_cache(key[token:][:1], value[token:][:1], key_cache, value_cache, slots)


def rotated(row, cos, sin, interleaved, dtype):
    """Heads with pairs ``(x, y)`` rotated: ``x cos - y sin``, ``y cos + x sin``, second products rounded."""
    half = len(cos)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(half), slice(half, 2 * half))
    )
    x, y = (as_float32(row[:, part], dtype) for part in (first, second))
    wide, row = cos.astype("f8"), row.copy()
    held = "bfloat16" if str(dtype) == "bfloat16" else row.dtype
    row[:, first] = from_float32((x * wide - y * sin).astype("f4"), held)
    row[:, second] = from_float32((y * wide + x * sin).astype("f4"), held)
    return row


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr
):
    """Write new rows into a paged cache whose blocks are listed in one row; two arrays, NHD."""
    block_size = paged_kv_cache[0].shape[1]
    places = {"batch_indices": batch_indices, "kv_indptr": kv_indptr}
    slots = slot_mapping(kv_indices, positions, block_size, **places)
    reshape_and_cache(append_key, append_value, paged_kv_cache[0], paged_kv_cache[1], slots)


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping):
    """Write latents and rope keys side by side."""
    for token, slot in enumerate(slot_mapping):
        if 0 <= slot < kv_cache.shape[0] * kv_cache.shape[1]:
            kv_cache[divmod(int(slot), kv_cache.shape[1])] = np.concatenate([kv_c[token], k_pe[token]])
