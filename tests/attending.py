"""What the tests of attention share: batches over a paged cache, and a dense computation of the same."""

import numpy as np


def batch(
    rng,
    seq_lens,
    query_lens=None,
    *,
    block_size=4,
    q_heads=4,
    kv_heads=2,
    head_size=8,
    value_head_size=None,
    spare=2,
    surplus=1,
):
    """The arguments of `paged_attention`, float32: blocks in random order, and NaN wherever nobody looks.

    `spare` blocks belong to no sequence, and `surplus` columns of the block table are behind every end.
    """
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + spare
    blocks = rng.permutation(num_blocks)
    table = rng.integers(-(2**31), 2**31, (len(seq_lens), max(counts, default=0) + surplus)).astype("i4")
    sizes = head_size, head_size if value_head_size is None else value_head_size
    caches = [np.full((num_blocks, block_size, kv_heads, size), np.nan, "f4") for size in sizes]
    for sequence, (length, count) in enumerate(zip(seq_lens, counts)):
        table[sequence, :count], blocks = blocks[:count], blocks[count:]
        for position in range(length):
            block, offset = table[sequence, position // block_size], position % block_size
            for cache in caches:
                cache[block, offset] = rng.standard_normal(cache.shape[2:])
    starts = np.cumsum([0, *(query_lens or [1] * len(seq_lens))]).astype("i4")
    query = rng.standard_normal((starts[-1], q_heads, head_size)).astype("f4")
    arguments = [query, *caches, table, np.array(seq_lens, "i4")]
    return arguments, {} if query_lens is None else {"query_start_loc": starts}


def dense(query, key_cache, value_cache, block_table, seq_lens, *, query_start_loc=None, **options):
    """Attention of each sequence as matrices with a mask, float64: ``(out, lse)``."""
    starts = np.arange(len(seq_lens) + 1) if query_start_loc is None else query_start_loc
    group = query.shape[1] // key_cache.shape[2]
    outs, lses = [], []
    for sequence, length in enumerate(seq_lens):
        count = -(-length // key_cache.shape[1])
        q = query[starts[sequence] : starts[sequence + 1]].astype("f8").swapaxes(0, 1)
        k, v = (
            np.repeat(
                np.concatenate([*cache[block_table[sequence, :count]], cache[0][:0]])[:length], group, 1
            )
            for cache in (key_cache, value_cache)
        )
        out, lse = attend(q, k.astype("f8").swapaxes(0, 1), v.astype("f8").swapaxes(0, 1), **options)
        outs.append(out.swapaxes(0, 1))
        lses.append(lse.swapaxes(0, 1))
    return np.concatenate(outs), np.concatenate(lses)


def attend(q, k, v, *, scale=None, sliding_window=None, soft_cap=None, sinks=None):
    """``softmax(q @ k.T) @ v`` for ``[heads, tokens, head_size]``, causal and aligned to the end."""
    scores = q @ k.swapaxes(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    distance = np.arange(k.shape[1]) - np.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    visible = distance <= 0
    if sliding_window is not None:
        visible &= distance > -sliding_window
    scores = np.where(visible, scores, -np.inf)
    sinks = np.full(len(q), -np.inf) if sinks is None else sinks.astype("f8")
    scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.logaddexp.reduce(scores, -1)
        weights = np.nan_to_num(np.exp(scores - lse[..., None]))
    return weights[..., :-1] @ v, lse
