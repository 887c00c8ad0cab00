"""paged_attention: queries attend to the tokens of their sequences, read where they lie in the cache."""

from __future__ import annotations

from typing import Any

from ..runtime.launch.arrays import Operand
from .attention_checks import check, type_of
from .attention_plans import plan
from .calls import Result
from .declaration import Array, DType, Float, Int, Name, Written
from .operation import operation, perform


def _results(query: Operand, value_cache: Operand, dtype: Any, **others: Any) -> dict[str, Result]:
    num_tokens, num_q_heads = query.shape[:2]
    return {
        "out": Result((num_tokens, num_q_heads, value_cache.shape[3]), type_of("query", query, dtype)),
        "lse": Result((num_tokens, num_q_heads), "float32"),
    }


@operation(check, plan, results=_results, aligned="query key_cache value_cache out")
def paged_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    query_start_loc: Array = None,
    key_scales: Array = None,
    value_scales: Array = None,
    scale: Float = None,
    sliding_window: Int = None,
    soft_cap: Float = None,
    sinks: Array = None,
    dtype: DType = None,
    out: Written = None,
    lse: Written = None,
    return_lse: bool = False,
    format: Name = None,
    batch_invariant: bool = False,
) -> Any:
    """Causal attention of query tokens to the cached tokens of their sequences, which are read in place.

    Decoding steps, whole prompts and chunks of prompts may be mixed in one batch. Token ``i`` of the ``n``
    query tokens of a sequence sees the positions up to ``seq_len - n + i``: the queries are the newest
    tokens, and their own keys and values are in the cache already.

    Parameters
    ----------
    query : [num_tokens, num_q_heads, head_size], float32, float16 or bfloat16
        The query tokens of all sequences, one sequence after the other. `num_q_heads` is a multiple of
        `num_kv_heads`; consecutive query heads share a head of the cache.
    key_cache, value_cache : [num_blocks, block_size, num_kv_heads, head_size]
        float32, float16, bfloat16, or int8 or fp8 codes, of any strides; the head size of values may differ.
    block_table : [num_seqs, max_blocks], int32
        The blocks of each sequence in order. Entries behind the end of a sequence are never read. Positions
        whose block is not in ``[0, num_blocks)``, or that the table has no entry for, are left out.
    seq_lens : [num_seqs], int32
        Tokens of each sequence that are in the cache, those of `query` included.
    query_start_loc : [num_seqs + 1], int32
        The query tokens of sequence ``s`` are ``query_start_loc[s]`` to ``query_start_loc[s + 1] - 1``. None:
        one token for each sequence. Rows of `out` and `lse` before the first and after the last are not
        written; in new arrays they hold anything.
    key_scales, value_scales : [num_blocks * block_size, num_kv_heads], float32
        Scales of codes, as `reshape_and_cache_quant` writes them; ``[1]`` or ``[num_kv_heads]`` where they
        were given to `reshape_and_cache_fp8`.
    scale : float
        Factor of the scores, by default ``head_size ** -0.5``.
    sliding_window : int
        How many positions a token sees at most, its own included.
    soft_cap : float
        Scores become ``soft_cap * tanh(score / soft_cap)``.
    sinks : [num_q_heads], float32
        A further score for each head, neither scaled nor capped, that takes part in the softmax without a
        value.
    dtype
        ``"bfloat16"`` where uint16 arrays among `query`, `out` and the caches hold bfloat16 bits.
    out : [num_tokens, num_q_heads, value_head_size]
        Takes the result, in the dtype of `query`.
    lse : [num_tokens, num_q_heads], float32
        Takes the logarithm (base e) of the softmax's denominator, sinks included.
    return_lse
        Return `lse` too.
    format
        ``"int8_per_token_head"``, ``"fp8_per_token_head"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``, where the
        caches hold codes. By default what their dtype says; uint8 arrays need it.
    batch_invariant
        Give each token the same bits whatever else is in the batch. By default a CPU device cuts a long
        context into parts where there are few tokens, which rounds differently.

    Returns
    -------
    array, or (array, array)
        `out`, and with `return_lse` also `lse`; new arrays where none are given.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape, option or queue does not fit; nothing is then written.

    Notes
    -----
    Sums are float32, rounded to the dtype of `query` once. A token that sees nothing, as in a sequence of
    length 0, has zeros and an `lse` of -inf; a score of -inf is left out likewise. Results are
    the same in every run.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> key_cache, value_cache = kv.empty_cache(4, 16, 8, 128)
    >>> queue = key_cache.sycl_queue
    >>> query = dpnp.ones((1, 32, 128), dtype="float32", sycl_queue=queue)
    >>> block_table = dpnp.asarray([[2, 0]], dtype="int32", sycl_queue=queue)
    >>> seq_lens = dpnp.asarray([17], dtype="int32", sycl_queue=queue)
    >>> out, lse = kv.paged_attention(
    ...     query, key_cache, value_cache, block_table, seq_lens, return_lse=True
    ... )
    >>> out.shape, round(float(lse[0, 0]), 4)  # 17 scores of 0: the logarithm of 17
    ((1, 32, 128), 2.8332)
    """
    __tracebackhide__ = True
    return perform(
        paged_attention,
        (
            query,
            key_cache,
            value_cache,
            block_table,
            seq_lens,
            query_start_loc,
            key_scales,
            value_scales,
            sinks,
            out,
            lse,
        ),
        (scale, sliding_window, soft_cap, dtype, return_lse, format, batch_invariant),
    )
