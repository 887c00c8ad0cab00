"""empty_cache and empty_quant_cache: memory for keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import formats
from ..layout import cache_shapes, inline_spans
from ..runtime.environment import devices
from ..runtime.launch import arrays, launch


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    dtype: Any = "float32",
    device: Any = None,
    usm_type: str = "device",
) -> tuple[Any, Any]:
    """Allocate a key cache and a value cache, filled with zeros.

    Zeros, because a reader that masks unwritten slots still multiplies them: stale NaN would survive.

    Parameters
    ----------
    num_blocks, block_size, num_kv_heads, head_size
        The shape of both caches, ``[num_blocks, block_size, num_kv_heads, head_size]``.
    value_head_size
        Head size of the value cache where it differs.
    dtype
        A dtype of 1, 2, 4 or 8 bytes. ``"bfloat16"`` gives uint16 arrays and ``"float8_e4m3fn"`` or
        ``"float8_e5m2"`` uint8 arrays, which hold the bits.
    device
        None for the best device (a Level Zero GPU, else any GPU, else the CPU), or a dpctl filter
        string, SyclDevice or SyclQueue.
    usm_type
        ``"device"``, ``"shared"`` or ``"host"``.

    Returns
    -------
    key_cache, value_cache : dpnp.ndarray

    Raises
    ------
    MemoryError
        A cache is larger than the device's largest allocation, or both are larger than its memory.

    Examples
    --------
    >>> key_cache, value_cache = empty_cache(256, 16, 8, 128)
    >>> key_cache.shape
    (256, 16, 8, 128)
    """
    __tracebackhide__ = True
    launch.refuse_after_fork()
    of_keys, of_values = cache_shapes(num_blocks, block_size, num_kv_heads, head_size, value_head_size)
    shapes = {"key_cache": of_keys, "value_cache": of_values}
    key_cache, value_cache = allocate(shapes, dict.fromkeys(shapes, dtype), device, usm_type)
    return key_cache, value_cache


def empty_quant_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    format: str = "int8_per_token_head",
    scales_by_block: bool = False,
    inline: str | None = None,
    device: Any = None,
    usm_type: str = "device",
) -> tuple[Any, Any, Any, Any]:
    """Allocate caches of codes for keys and values, and their scales, all filled with zeros.

    A fresh cache decodes to 0 everywhere.

    Parameters
    ----------
    num_blocks, block_size, num_kv_heads, head_size, value_head_size, device, usm_type
        As for `empty_cache`.
    format
        ``"int8_per_token_head"`` or ``"fp8_per_token_head"``, whose codes are uint8 arrays that hold the
        bits of float8_e4m3fn.
    scales_by_block
        Give the scales the axes of the codes, ``[num_blocks, block_size, num_kv_heads]``, so that one index
        fits both: ``kq[block, offset, head] * ks[block, offset, head]``. Every operation takes both shapes,
        which are the same memory.
    inline
        ``"NHD"`` or ``"HND"`` allocates once, rows of bytes ``[K codes | float32 | V codes | float32]`` for
        each token and head, in this order within a block, so that a block is one range of bytes. The four
        arrays are views of it, with scales by block; head sizes must be multiples of 4. A token takes as
        many bytes as without: ``2 * (head_size + 4)`` for each head.

    Returns
    -------
    kq, vq : dpnp.ndarray, int8 or uint8
        Codes, ``[num_blocks, block_size, num_kv_heads, head_size]``.
    ks, vs : dpnp.ndarray, float32
        Scales by slot, ``[num_blocks * block_size, num_kv_heads]``: those of codes ``[block, offset, head]``
        are at ``[block * block_size + offset, head]``.

    Raises
    ------
    MemoryError
        As for `empty_cache`.

    Examples
    --------
    >>> kq, vq, ks, vs = empty_quant_cache(256, 16, 8, 128)
    >>> kq.shape, ks.shape
    ((256, 16, 8, 128), (4096, 8))
    """
    __tracebackhide__ = True
    launch.refuse_after_fork()
    kq, vq = cache_shapes(num_blocks, block_size, num_kv_heads, head_size, value_head_size)
    if inline is not None:
        return _inline(kq, vq, inline, formats.quantized(format).dtype, device, usm_type)
    scales = kq[:3] if scales_by_block else (kq[0] * kq[1], kq[2])
    shapes = {"kq": kq, "vq": vq, "ks": scales, "vs": scales}
    codes = formats.quantized(format).dtype
    dtypes = {"kq": codes, "vq": codes, "ks": "float32", "vs": "float32"}
    codes_k, codes_v, scales_k, scales_v = allocate(shapes, dtypes, device, usm_type)
    return codes_k, codes_v, scales_k, scales_v


def _inline(
    of_keys: tuple[int, int, int, int],
    of_values: tuple[int, int, int, int],
    order: str,
    code_type: str,
    device: Any,
    usm_type: str,
) -> tuple[Any, Any, Any, Any]:
    """Codes and scales as views of one allocation."""
    block_bytes, spans = inline_spans(of_keys, of_values, order)
    shapes = {"keys, values and scales": (of_keys[0], block_bytes)}
    (memory,) = allocate(shapes, dict.fromkeys(shapes, "uint8"), device, usm_type)
    codes = arrays.storage_dtype(code_type)
    dtypes = codes, codes, np.dtype("float32"), np.dtype("float32")
    kq, vq, ks, vs = (
        arrays.viewed(memory, span.shape, span.strides, first, dtype)
        for (span, first), dtype in zip(spans, dtypes)
    )
    return kq, vq, ks, vs


def allocate(
    shapes: Mapping[str, tuple[int, ...]], dtypes: dict[str, Any], device: Any, usm_type: str
) -> list[Any]:
    """Zero-filled dpnp arrays, once all of them are known to fit."""
    __tracebackhide__ = True
    queue = devices.queue_for(device)
    storage = {name: arrays.storage_dtype(dtypes[name]) for name in shapes}
    sizes = {name: math.prod(shapes[name]) * storage[name].itemsize for name in shapes}
    _require_memory(queue.sycl_device, shapes, sizes)
    return [arrays.zeros(shapes[name], storage[name], queue, usm_type) for name in shapes]


def _require_memory(device: Any, shapes: Mapping[str, tuple[int, ...]], sizes: dict[str, int]) -> None:
    largest, total = device.max_mem_alloc_size, device.global_mem_size
    for name, size in sizes.items():
        if size > largest:
            blocks = largest * shapes[name][0] // size
            raise MemoryError(
                f"`num_blocks` = {shapes[name][0]} needs {_gib(size)} for {name}, but {device.name} "
                f"allocates at most {_gib(largest)} at once; use at most {blocks} blocks, or one "
                "cache for each layer"
            )
    if sum(sizes.values()) > total:
        raise MemoryError(
            f"the caches need {_gib(sum(sizes.values()))}, but {device.name} has {_gib(total)}; use "
            "fewer blocks or a smaller dtype"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
