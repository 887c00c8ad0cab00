"""What the arguments of paged_attention must be."""

from __future__ import annotations

import math
from typing import Any

from ..runtime.launch.arrays import Operand
from . import validate

VALUES = ("float32", "float16", "bfloat16")


def type_of(name: str, operand: Operand, dtype: Any) -> str:
    """The type of an array's values; `dtype` says what uint16 arrays hold, others may be of their own."""
    return validate.float_type(name, operand, dtype if operand.dtype_name == "uint16" else None)


def check(
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
    format: Any,
    batch_invariant: bool,
) -> None:
    value_type = type_of("query", query, dtype)
    if len(query.shape) != 3:
        raise ValueError(
            f"`query` must have shape [num_tokens, num_q_heads, head_size], got {list(query.shape)}"
        )
    _check_caches(query, key_cache, value_cache)
    _check_sequences(query, block_table, seq_lens, query_start_loc)
    code_type = code_type_of(key_cache, format, dtype)
    for name, scales, cache_name, cache in (
        ("key_scales", key_scales, "key_cache", key_cache),
        ("value_scales", value_scales, "value_cache", value_cache),
    ):
        if scales is not None and code_type in VALUES:
            raise ValueError(f"`{name}` must be None, for `{cache_name}` is {code_type}, which has no scales")
        if scales is None and code_type not in VALUES:
            raise ValueError(f"`{name}` must be given, for `{cache_name}` is {code_type}, got None")
        if scales is not None:
            validate.any_scales(name, scales, cache_name, cache)
    if sinks is not None:
        validate.of_type("sinks", sinks, "float32")
        validate.of_shape("sinks", sinks, (query.shape[1],), "[num_q_heads]")
    _check_numbers(scale, sliding_window, soft_cap)
    if out is not None and type_of("out", out, dtype) != value_type:
        raise TypeError(f"`out` must have the dtype of `query`, {query.dtype_name}, got {out.dtype_name}")
    if lse is not None:
        validate.of_type("lse", lse, "float32")


def code_type_of(key_cache: Operand, format: Any, dtype: Any) -> str:
    """The type of the elements of the caches."""
    if key_cache.dtype_name in ("int8", "uint8", "float8_e4m3fn", "float8_e5m2") or format is not None:
        return validate.codes("key_cache", key_cache, format)
    return type_of("key_cache", key_cache, dtype)


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
