"""paged_attention: queries attend to the tokens of their sequences, read where they lie in the cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..kernels.intrinsics import LOCAL_WORDS
from ..kernels.paged_attention_strided import paged_attention_strided
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan, Result
from .declaration import Array, DType, Float, Int, Written
from .groups import CPU_VECTOR, group_limit, round_up
from .operation import operation, perform
from .plan import plan_of

LOG2_E = math.log2(math.e)
NO_WINDOW = 2**31  # more than a sequence can have


def _check(
    query: Operand,
    key_cache: Operand,
    value_cache: Operand,
    block_table: Operand,
    seq_lens: Operand,
    query_start_loc: Operand | None,
    key_scales: Operand | None,
    value_scales: Operand | None,
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Operand | None,
    dtype: Any,
    out: Operand | None,
    lse: Operand | None,
    return_lse: bool,
) -> None:
    value_type = _type_of("query", query, dtype)
    if len(query.shape) != 3:
        raise ValueError(
            f"`query` must have shape [num_tokens, num_q_heads, head_size], got {list(query.shape)}"
        )
    _check_caches(query, key_cache, value_cache)
    _check_sequences(query, block_table, seq_lens, query_start_loc)
    for name, scales, cache_name, cache in (
        ("key_scales", key_scales, "key_cache", key_cache),
        ("value_scales", value_scales, "value_cache", value_cache),
    ):
        if cache.dtype_name == "int8":
            if scales is None:
                raise ValueError(f"`{name}` must be given where `{cache_name}` is int8, got None")
            validate.scales(name, scales, cache_name, cache)
        else:
            _type_of(cache_name, cache, dtype)
            if scales is not None:
                raise ValueError(f"`{name}` must be None, for `{cache_name}` is {cache.dtype_name}, not int8")
    if sinks is not None:
        validate.of_type("sinks", sinks, "float32")
        validate.of_shape("sinks", sinks, (query.shape[1],), "[num_q_heads]")
    _check_numbers(scale, sliding_window, soft_cap)
    if out is not None and _type_of("out", out, dtype) != value_type:
        raise TypeError(f"`out` must have the dtype of `query`, {query.dtype_name}, got {out.dtype_name}")
    if lse is not None:
        validate.of_type("lse", lse, "float32")


def _type_of(name: str, operand: Operand, dtype: Any) -> str:
    """The type of an array's values; `dtype` says what uint16 arrays hold, and others may be of their own."""
    return validate.float_type(name, operand, dtype if operand.dtype_name == "uint16" else None)


def _check_caches(query: Operand, key_cache: Operand, value_cache: Operand) -> None:
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if len(cache.shape) != 4 or 0 in cache.shape[1:]:
            raise ValueError(
                f"`{name}` must have shape [num_blocks, block_size, num_kv_heads, head_size], with sizes of "
                f"at least 1 but for num_blocks, got {list(cache.shape)}"
            )
    if value_cache.shape[:3] != key_cache.shape[:3]:
        raise ValueError(
            f"`value_cache` must have the blocks, slots and heads of `key_cache`, "
            f"{list(key_cache.shape[:3])}, got {list(value_cache.shape[:3])}"
        )
    if value_cache.dtype != key_cache.dtype:
        raise TypeError(
            f"`value_cache` must have the dtype of `key_cache`, {key_cache.dtype_name}, got "
            f"{value_cache.dtype_name}"
        )
    num_q_heads, head_size = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    if head_size != key_cache.shape[3]:
        raise ValueError(
            f"`query` must have the head_size of `key_cache`, {key_cache.shape[3]}, got {head_size}"
        )
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"`query` must have a multiple of the {num_kv_heads} heads of `key_cache`, got {num_q_heads} "
            "heads"
        )


def _check_sequences(
    query: Operand, block_table: Operand, seq_lens: Operand, query_start_loc: Operand | None
) -> None:
    for name, operand in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        if operand is not None:
            validate.of_type(name, operand, "int32")
    if len(block_table.shape) != 2:
        raise ValueError(
            f"`block_table` must have shape [num_seqs, max_blocks], got {list(block_table.shape)}"
        )
    num_seqs, num_tokens = block_table.shape[0], query.shape[0]
    validate.of_shape("seq_lens", seq_lens, (num_seqs,), "[num_seqs]")
    if query_start_loc is not None:
        validate.of_shape("query_start_loc", query_start_loc, (num_seqs + 1,), "[num_seqs + 1]")
    elif num_tokens != num_seqs:
        raise ValueError(
            f"`query` must have one token for each of the {num_seqs} sequences of `block_table`, got "
            f"{num_tokens}; pass query_start_loc for sequences of several tokens"
        )


def _check_numbers(scale: float | None, sliding_window: int | None, soft_cap: float | None) -> None:
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"`scale` must be finite, got {scale}")
    if soft_cap is not None and not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"`soft_cap` must be a positive number or None, got {soft_cap}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"`sliding_window` must be at least 1, the token itself, or None, got {sliding_window}"
        )


def _results(query: Operand, value_cache: Operand, dtype: Any, **others: Any) -> dict[str, Result]:
    num_tokens, num_q_heads = query.shape[:2]
    return {
        "out": Result((num_tokens, num_q_heads, value_cache.shape[3]), _type_of("query", query, dtype)),
        "lse": Result((num_tokens, num_q_heads), "float32"),
    }


def _plan(
    query: Operand,
    key_cache: Operand,
    value_cache: Operand,
    block_table: Operand,
    seq_lens: Operand,
    query_start_loc: Operand | None,
    key_scales: Operand | None,
    value_scales: Operand | None,
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Operand | None,
    dtype: Any,
    out: Operand,
    lse: Operand | None,
    return_lse: bool,
    alignment: int,
) -> Plan | None:
    num_tokens, num_q_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, value_head_size = value_cache.shape
    num_seqs, max_blocks = block_table.shape
    if 0 in (num_tokens, num_q_heads, num_seqs):
        return None
    device = query.queue.sycl_device
    lanes = min(round_up(-(-value_head_size // 8), CPU_VECTOR), group_limit(device), LOCAL_WORDS // 2)
    if value_head_size > 8 * lanes:
        raise ValueError(
            f"`value_cache` must have heads of at most {8 * lanes} values on {device.name}, got "
            f"{value_head_size}"
        )
    value_type = _type_of("query", query, dtype)
    code_type = "int8" if key_cache.dtype_name == "int8" else _type_of("key_cache", key_cache, dtype)
    scale = head_size**-0.5 if scale is None else scale
    factor, cap = (scale * LOG2_E, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2_E)
    return plan_of(
        paged_attention_strided,
        {"value": value_type, "code": code_type},
        ((lanes, num_q_heads, num_tokens), (lanes, 1, 1)),
        alignment,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        key_scales=key_scales and validate.scales("key_scales", key_scales, "key_cache", key_cache),
        value_scales=value_scales
        and validate.scales("value_scales", value_scales, "value_cache", value_cache),
        sinks=sinks,
        out=out,
        lse=lse,
        listed=int(query_start_loc is not None),
        sinking=int(sinks is not None),
        with_lse=int(lse is not None),
        num_seqs=num_seqs,
        num_blocks=num_blocks,
        block_size=block_size,
        capacity=max_blocks * block_size,
        heads_per_kv_head=num_q_heads // num_kv_heads,
        head_size=head_size,
        value_head_size=value_head_size,
        window=min(sliding_window or NO_WINDOW, NO_WINDOW),
        scale_bits=_bits(factor),
        cap_bits=_bits(cap),
        lanes=lanes,
    )


def _bits(number: float) -> int:
    """The bits of a float32, as a launch passes it."""
    return int(np.float32(number).view(np.int32))


@operation(_check, _plan, results=_results)
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
        float32, float16, bfloat16 or int8, of any strides; the head size of values may differ.
    block_table : [num_seqs, max_blocks], int32
        The blocks of each sequence in order. Entries behind the end of a sequence are never read. Positions
        whose block is not in ``[0, num_blocks)``, or that the table has no entry for, are left out.
    seq_lens : [num_seqs], int32
        Tokens of each sequence that are in the cache, those of `query` included.
    query_start_loc : [num_seqs + 1], int32
        The query tokens of sequence ``s`` are ``query_start_loc[s]`` to ``query_start_loc[s + 1] - 1``. None:
        one token for each sequence. Rows of `out` and `lse` before the first and after the last are not
        written.
    key_scales, value_scales : [num_blocks * block_size, num_kv_heads], float32
        Scales of int8 caches, as `reshape_and_cache_quant` writes them.
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
    length 0, has zeros and an `lse` of -inf; a score of -inf is left out likewise. Results do not depend on
    the rest of the batch and are the same in every run.

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
    arrays = query, key_cache, value_cache, block_table, seq_lens, query_start_loc, key_scales, value_scales
    options = scale, sliding_window, soft_cap, dtype, return_lse
    return perform(paged_attention, (*arrays, sinks, out, lse), options)
