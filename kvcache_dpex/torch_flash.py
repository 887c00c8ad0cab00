"""flash-attn's functions over paged_attention; `kvcache_dpex.torch` has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch

_attend = dispatch.registered.paged_attention.default
_write = dispatch.registered.reshape_and_cache.default
_quantize = dispatch.registered.reshape_and_cache_quant.default


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of a batch of equally long sequences, with flash-attn's name and arguments.

    Parameters
    ----------
    q : [batch, seqlen_q, num_q_heads, head_size], float32, float16 or bfloat16
    k, v : [batch, seqlen_k, num_kv_heads, head_size]
    softmax_scale
        Factor of the scores, by default ``head_size ** -0.5``.
    causal
        Query ``i`` sees keys up to ``seqlen_k - seqlen_q + i``; otherwise each sees all of them.
    window_size
        With `causal`, how many keys before its own a query sees; -1: all of them.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; 0: they stay as they are.
    deterministic
        Results are the same in every run, whatever this says.
    s_aux : [num_q_heads], float32
        A further score of each head that has no value (a sink).
    dropout_p, alibi_slopes, return_attn_probs
        Refused unless 0, None and False.

    Returns
    -------
    Tensor
        ``[batch, seqlen_q, num_q_heads, value_head_size]``, new, in the dtype of `q`.

    Examples
    --------
    >>> q, k = torch.ones(2, 3, 4, 8), torch.ones(2, 5, 1, 8)
    >>> flash_attn_func(q, k, 2 * k, causal=True)[1, 2, 3, 0]
    tensor(2.)
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    batch, length = q.shape[:2]
    table = torch.arange(k.shape[0], dtype=torch.int32, device=q.device)[:, None]
    lens = torch.full((k.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
    options = _options(softmax_scale, causal, window_size, softcap, s_aux)
    return _attention(q.flatten(0, 1), k, v, table, lens, starts, causal, options).unflatten(
        0, (batch, length)
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of sequences of different lengths, one after the other, with flash-attn's arguments.

    Parameters
    ----------
    q : [total_q, num_q_heads, head_size]
    k, v : [total_k, num_kv_heads, head_size]
        With `block_table` ``[num_blocks, block_size, num_kv_heads, head_size]``.
    cu_seqlens_q, cu_seqlens_k : [num_seqs + 1]
        Where each sequence starts, and where the last one ends.
    max_seqlen_q, max_seqlen_k
        The first is not needed; without the second, the lengths are read from the device.
    block_table : [num_seqs, max_blocks], optional
        The blocks of each sequence in `k` and `v`.

    The others, and what is returned, are as for `flash_attn_func`; without `causal`, the lengths of the
    queries are read from the device.

    Examples
    --------
    >>> q, starts = torch.ones(4, 2, 8), torch.tensor([0, 1, 4])
    >>> flash_attn_varlen_func(q, q, 3 * q, starts, starts, 3, 3, causal=True)[3, 0, 0]
    tensor(3.)
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    starts, firsts = cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)
    lens = firsts.diff()
    if block_table is None:  # each row is a block of its own
        longest = int(lens.max()) if max_seqlen_k is None else int(max_seqlen_k)
        block_table = firsts[:-1, None] + torch.arange(longest, dtype=torch.int32, device=q.device)
        k, v = k.unsqueeze(1), v.unsqueeze(1)
    options = _options(softmax_scale, causal, window_size, softcap, s_aux)
    return _attention(q, k, v, block_table.to(torch.int32), lens, starts, causal, options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Any,
    v_cache: Any,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Write new keys and values to a cache and attend to it in place, with flash-attn's arguments.

    Parameters
    ----------
    q : [batch, seqlen_q, num_q_heads, head_size]
    k_cache, v_cache : [num_blocks, block_size, num_kv_heads, head_size]
        Changed in place. Without `block_table`, ``[batch, max_seqlen, num_kv_heads, head_size]``. Each may be
        a pair ``(codes, scales)``, as `reshape_and_cache_quant` writes them.
    k, v : [batch, seqlen_new, num_kv_heads, head_size], optional
        Written behind the first `cache_seqlens` tokens of each sequence.
    cache_seqlens : [batch] or int
        Tokens that each sequence has in the cache, those of `k` not included.
    block_table : [batch, max_blocks], optional
        The blocks of each sequence.
    rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes, return_softmax_lse
        Refused unless None and False; `rotary_interleaved` and `num_splits` are then without meaning.

    The others, and what is returned, are as for `flash_attn_func`.

    Examples
    --------
    >>> k_cache, v_cache = torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8)
    >>> new, table = torch.ones(1, 1, 2, 8), torch.tensor([[3, 1]])
    >>> _ = flash_attn_with_kvcache(new, k_cache, v_cache, new, new, cache_seqlens=17, block_table=table)
    >>> k_cache.sum((2, 3)).nonzero()
    tensor([[1, 1]])
    """
    _refuse(
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
        return_softmax_lse=return_softmax_lse,
    )
    options = _options(softmax_scale, causal, window_size, softcap, s_aux)
    (k_cache, k_scales), (v_cache, v_scales) = _codes_and_scales(k_cache), _codes_and_scales(v_cache)
    batch, length = q.shape[:2]
    whole = torch.tensor(k_cache.shape[1]) if cache_seqlens is None else torch.as_tensor(cache_seqlens)
    lens = whole.to(q.device, torch.int32).expand(batch)
    if block_table is None:
        block_table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    block_table = block_table.to(torch.int32)
    if k is not None and v is not None:
        slots = _slots(block_table, lens, k.shape[1], k_cache.shape[1])
        rows = k.flatten(0, 1), v.flatten(0, 1)
        if k_scales is None:
            _write(*rows, k_cache, v_cache, slots)
        else:
            _quantize(*rows, k_cache, v_cache, k_scales, v_scales, slots)
        lens = lens + k.shape[1]
    elif k is not None or v is not None:
        raise ValueError(f"`k` and `v` must both be given or both be None, got {'k' if v is None else 'v'}")
    options.update(key_scales=k_scales, value_scales=v_scales)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
    out = _attention(
        q.flatten(0, 1), k_cache, v_cache, block_table, lens.contiguous(), starts, causal, options
    )
    return out.unflatten(0, (batch, length))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, starts: Tensor, causal: bool, options: dict
) -> Tensor:
    """Without `causal` each query is a sequence of its own, that ends where the keys end."""
    if causal:
        return _attend(q, k, v, table, lens, query_start_loc=starts, **options)[0]
    if len(q) != len(lens):
        table, lens = (each.repeat_interleave(starts.diff(), 0) for each in (table, lens))
    return _attend(q, k, v, table, lens, **options)[0]


def _slots(block_table: Tensor, lens: Tensor, count: int, block_size: int) -> Tensor:
    """Slots of `count` tokens behind `lens`; -1 where the table has no block."""
    positions = lens[:, None].long() + torch.arange(count, device=lens.device)
    index = positions // block_size
    blocks = block_table.long().gather(1, index.clamp(max=block_table.shape[1] - 1))
    known = (index < block_table.shape[1]) & (blocks >= 0)
    return torch.where(known, blocks * block_size + positions % block_size, -1).flatten()


def _options(
    scale: float | None, causal: bool, window: tuple[int, int], soft_cap: float, sinks: Tensor | None
) -> dict[str, Any]:
    left, right = window
    if right > 0 or (left >= 0 and not causal):
        raise ValueError(
            f"`window_size` must be (-1, -1), or (keys before its own, 0 or -1) with causal=True, got "
            f"{(left, right)} with causal={causal}"
        )
    return {
        "scale": scale,
        "sliding_window": left + 1 if left >= 0 else None,
        "soft_cap": soft_cap or None,
        "sinks": None if sinks is None else sinks.float(),
    }


def _codes_and_scales(cache: Any) -> tuple[Tensor, Tensor | None]:
    return cache if isinstance(cache, (tuple, list)) else (cache, None)  # type: ignore[return-value]


def _refuse(**options: Any) -> None:
    """Options that the kernels do not have."""
    for name, value in options.items():
        if value is not None and (isinstance(value, Tensor) or value):
            raise NotImplementedError(
                f"`{name}` is not supported, leave it at its default; got "
                f"{type(value).__name__ if isinstance(value, Tensor) else value}"
            )
