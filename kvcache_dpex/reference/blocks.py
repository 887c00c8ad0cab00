"""Blocks moved, tokens mapped to their slots, rotations, and the names of other systems."""

from __future__ import annotations

import numpy as np

from .rows import as_float32, from_float32, reshape_and_cache


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
