"""What the tests of attention share: batches over a paged cache, and a dense computation of the same."""

import numpy as np

from helpers import SENTINEL, Twins, sentinel
from kvcache_dpex import reference
from kvcache_dpex.ops import attention
from quantizing import VALUES, option, stored

U = 2.0**-24  # the error of a float32 operation, relative to its result
ROUNDING = {"float32": U, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def batch(
    rng,
    seq_lens,
    query_lens=None,
    *,
    block_size=4,
    q_heads=4,
    kv_heads=2,
    head_size=16,
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


def as_cache(arguments, code):
    """The same batch with caches of another type, and the scales of int8 caches, NaN where nobody looks."""
    query, key_cache, value_cache, *rest = arguments
    if code in VALUES:
        return [query, stored(key_cache, code), stored(value_cache, code), *rest], {}
    caches, scales = [], {}
    for name, cache in (("key_scales", key_cache), ("value_scales", value_cache)):
        codes = np.full(cache.shape, 77, "u1" if code == "fp8" else "i1")
        scales[name] = np.full((cache.shape[0] * cache.shape[1], cache.shape[2]), np.nan, "f4")
        for slot, rows in enumerate(cache.reshape(-1, *cache.shape[2:])):
            for head, row in enumerate(rows):
                if np.isfinite(row).all():
                    quantized = (reference.quantize_row_fp8 if code == "fp8" else reference.quantize_row)(row)
                    codes.reshape(-1, *cache.shape[2:])[slot, head], scales[name][slot, head] = quantized
        caches.append(codes)
    return [query, *caches, *rest], {**scales, **({"format": "fp8_per_token_head"} if code == "fp8" else {})}


def bounds(arguments, options, out, lse):
    """How far float32 results may be from `out` and `lse`, which are exact; for each token and head.

    With u = 2**-24, a dot product of D terms is off by at most D u sum|q k| (Higham, Accuracy and Stability
    of Numerical Algorithms, section 3.1). Scaling, capping, the difference from the largest score and exp2
    add a few u of the scores. Every weight is then right but for a factor 1 + e, and with it the quotient of
    the two sums but for 2 e of sum(p |v|), which is at most the largest |v|. Sums of n terms, rescaled at
    most n times, add 2 n u.
    """
    query, key_cache, value_cache, _, seq_lens = arguments
    if "key_scales" in options:
        form = {"format": options.get("format")}
        key_cache = reference.dequant_cache(key_cache, options["key_scales"], **form)
        value_cache = reference.dequant_cache(value_cache, options["value_scales"], **form)
    scale = abs(options.get("scale") or query.shape[2] ** -0.5)
    longest = max(int(max(seq_lens, default=0)), 1)
    largest_value = largest_of(value_cache)
    rows = abs(key_cache).reshape(-1, key_cache.shape[3])
    scores = scale * largest_of(abs(query).reshape(-1, query.shape[2]) @ rows.T)
    scores += largest_of(options.get("sinks", np.zeros(0)))
    cap = options.get("soft_cap") or 0.0
    weight = 2 * ((query.shape[2] + 8) * scores + 4 * cap + 8) * U
    sums = 4 * (longest + 4) * U
    return (2 * weight + sums) * largest_value, weight + sums + 4 * U * np.abs(
        np.where(np.isfinite(lse), lse, 0)
    )


def largest_of(array):
    """The largest magnitude of the numbers in an array."""
    return np.max(np.abs(array), initial=0, where=np.isfinite(array))


def check_attention(queue, arguments, options, *, value="float32", gap=0, with_lse=True, wrap=None):
    """The package's results are the oracle's within `bounds`, and every other byte is as it was."""
    query = stored(arguments[0], value)
    host = [query, *arguments[1:]]
    num_tokens, num_q_heads, _ = query.shape
    size = arguments[2].shape[3]
    out = sentinel((num_tokens, num_q_heads, size + gap), query.dtype)[..., :size]
    lse = sentinel((num_tokens, num_q_heads), "float32")
    twins = Twins(queue)
    on_device = [twins.view(array) for array in host]
    results = {"out": twins.view(out), "lse": twins.view(lse)}
    if not with_lse:
        del results["lse"]
    given = {
        name: twins.view(each) if isinstance(each, np.ndarray) else each for name, each in options.items()
    }
    returned = attention.paged_attention(*on_device, **given, **results, **option(value))
    assert returned is results["out"]
    exact = [np.full(array.shape, np.inf) for array in (out, lse)]
    with np.errstate(invalid="ignore"):
        reference.paged_attention(*host, **options, dtype=value, out=exact[0], lse=exact[1])
    found_out, found_lse = (np.copy(array) for array in (out, lse))
    for array, copy in ((out, found_out), (lse, found_lse)):
        copy[...] = twins.host(array)
    written = exact[0] != np.inf
    floats = [
        each
        if each.dtype == np.uint8
        else reference.as_float32(each, value if each.dtype == np.uint16 else None)
        for each in (query, *host[1:3])
    ]
    off_out, off_lse = bounds([*floats, *host[3:]], options, *exact)
    values = reference.as_float32(found_out, value).astype("f8")
    allowed = off_out + np.where(written, abs(exact[0]), 0) * ROUNDING[value] * (value != "float32") + 1e-30
    assert (abs(values[written] - exact[0][written]) <= np.broadcast_to(allowed, out.shape)[written]).all()
    if with_lse:
        seen = np.isfinite(exact[1])
        assert (abs(found_lse[seen] - exact[1][seen]) <= off_lse[seen]).all()
        np.testing.assert_array_equal(found_lse[np.isneginf(exact[1])], -np.inf)
        seen |= np.isneginf(exact[1])
        assert (found_lse.view("u1").reshape(*lse.shape, 4)[~seen] == SENTINEL).all()
    untouched = found_out.view("u1").reshape(*out.shape, out.itemsize)[~written]
    assert (untouched == SENTINEL).all()
    out[written], lse[...] = found_out[written], found_lse
    twins.assert_equal()
