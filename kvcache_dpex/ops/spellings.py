"""append_paged_kv_cache and concat_and_cache_mla: writes by the names and layouts of FlashInfer and vLLM."""

from __future__ import annotations

from typing import Any, Callable

from ..runtime.launch import arrays, launch
from .quantize import reshape_and_cache_quant
from .slots import slot_mapping as map_slots
from .write import reshape_and_cache


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any = None,
    kv_layout: str = "NHD",
) -> None:
    """Write new rows into a paged cache, by FlashInfer's name and arguments.

    Parameters
    ----------
    append_key, append_value : [nnz, num_kv_heads, head_size]
        New rows.
    batch_indices, positions : [nnz], int32 or int64
        As `get_batch_indices_positions` gives them. A token with a negative one is skipped.
    paged_kv_cache
        Changed in place: keys and values as two arrays, or as one ``[num_blocks, 2, ...]``; each is
        ``[num_blocks, block_size, num_kv_heads, head_size]`` in layout NHD and ``[num_blocks, num_kv_heads,
        block_size, head_size]`` in HND.
    kv_indices : [num_indices], in the dtype of `batch_indices`
        The blocks of all sequences, one after the other, those of the new tokens included.
    kv_indptr : [batch_size + 1]
        Sequence ``n`` has the blocks from ``kv_indptr[n]`` to ``kv_indptr[n + 1] - 1``. Positions beyond them
        are skipped.
    kv_last_page_len
        Not needed: positions say where rows go.
    kv_layout
        ``"NHD"`` or ``"HND"``.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape, layout or queue does not fit; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> caches = kv.empty_cache(4, 16, 8, 128)
    >>> key = dpnp.ones((3, 8, 128), dtype="float32")
    >>> starts, lens = dpnp.asarray([0, 1, 3]), dpnp.asarray([17, 2])
    >>> places = kv.get_batch_indices_positions(starts, lens, 3)
    >>> indices, indptr = dpnp.asarray([2, 0, 3]), dpnp.asarray([0, 2, 3])
    >>> kv.append_paged_kv_cache(key, key, *places, caches, indices, indptr)
    >>> float(caches[0][0, 0].sum()), float(caches[0][3, :2].sum())
    (1024.0, 2048.0)
    """
    launch.refuse_after_fork()
    rows, places = (append_key, append_value), (batch_indices, positions, kv_indices, kv_indptr)
    append(map_slots, reshape_and_cache, rows, places, paged_kv_cache, kv_layout)


def concat_and_cache_mla(
    kv_c: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    *,
    scales: Any = None,
    dtype: Any = None,
    format: str | None = None,
) -> None:
    """Write latents and rope keys of multi-head latent attention side by side, by vLLM's name.

    Parameters
    ----------
    kv_c : [num_tokens, kv_lora_rank]
        Latents.
    k_pe : [num_tokens, rope_dim]
        Rope keys.
    kv_cache : [num_blocks, block_size, kv_lora_rank + rope_dim]
        Changed in place: in the dtype of `kv_c`, bit for bit, or codes where there are `scales`.
    slot_mapping : [num_tokens], int32 or int64
        As for `reshape_and_cache`.
    scales : [num_blocks * block_size, 2], float32
        Scales by slot, changed in place: that of the latent, then that of the rope key, each quantized as
        `reshape_and_cache_quant` does a head.
    dtype, format
        As for `reshape_and_cache_quant`; without `scales` they must be left out.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or queue does not fit; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> kv_cache = dpnp.zeros((4, 16, 576), dtype="float32")
    >>> latent, rope = dpnp.ones((2, 512), dtype="float32"), dpnp.ones((2, 64), dtype="float32")
    >>> kv.concat_and_cache_mla(latent, 2 * rope, kv_cache, dpnp.asarray([17, -1]))
    >>> float(kv_cache[1, 1].sum()), float(kv_cache.sum())
    (640.0, 640.0)
    """
    launch.refuse_after_fork()
    concat(
        reshape_and_cache, reshape_and_cache_quant, kv_c, k_pe, kv_cache, slot_mapping, scales, dtype, format
    )


def append(
    slots_of: Callable[..., Any],
    write: Callable[..., None],
    rows: tuple[Any, Any],
    places: tuple[Any, Any, Any, Any],
    paged_kv_cache: Any,
    kv_layout: str,
) -> None:
    """`append_paged_kv_cache` by functions that do as `slot_mapping` and `reshape_and_cache`."""
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"`kv_layout` must be 'NHD' or 'HND', got {kv_layout!r}")
    if isinstance(paged_kv_cache, (tuple, list)):
        key_cache, value_cache = paged_kv_cache
    elif len(paged_kv_cache.shape) == 5 and paged_kv_cache.shape[1] == 2:
        key_cache, value_cache = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    else:
        raise ValueError(
            "`paged_kv_cache` must be a pair of arrays or have shape [num_blocks, 2, ...] with 5 axes, got "
            f"{list(paged_kv_cache.shape)}"
        )
    if kv_layout == "HND":
        key_cache, value_cache = arrays.swapped(key_cache, 1, 2), arrays.swapped(value_cache, 1, 2)
    batch_indices, positions, kv_indices, kv_indptr = places
    block_size = key_cache.shape[1]
    slots = slots_of(kv_indices, positions, block_size, batch_indices=batch_indices, kv_indptr=kv_indptr)
    write(*rows, key_cache, value_cache, slots)


def concat(
    write: Callable[..., None],
    quantize: Callable[..., None],
    kv_c: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    scales: Any,
    dtype: Any,
    format: Any,
) -> None:
    """`concat_and_cache_mla` by functions that do as `reshape_and_cache` and `reshape_and_cache_quant`."""
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        if len(rows.shape) != 2:
            raise ValueError(f"`{name}` must have shape [num_tokens, size], got {list(rows.shape)}")
    rank, rope = kv_c.shape[1], k_pe.shape[1]
    if len(kv_cache.shape) != 3 or kv_cache.shape[2] != rank + rope:
        raise ValueError(
            f"`kv_cache` must have shape [num_blocks, block_size, {rank + rope}], the sizes of `kv_c` and "
            f"`k_pe`, got {list(kv_cache.shape)}"
        )
    rows = kv_c[:, None], k_pe[:, None]
    caches = kv_cache[:, :, None, :rank], kv_cache[:, :, None, rank:]
    if scales is None:
        if (dtype, format) != (None, None):
            raise ValueError(
                "`dtype` and `format` are for codes: pass their `scales` as well, or leave them out"
            )
        write(*rows, *caches, slot_mapping)
        return
    if len(scales.shape) != 2 or scales.shape[1] != 2:
        raise ValueError(f"`scales` must have shape [num_blocks * block_size, 2], got {list(scales.shape)}")
    quantize(*rows, *caches, scales[:, :1], scales[:, 1:], slot_mapping, dtype=dtype, format=format)
