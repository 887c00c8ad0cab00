"""The operations on torch tensors, on the CPU and on Intel GPUs (XPU): no copy, and traced by torch.compile.

A launch takes the tensors' own memory. On the CPU an operation is done when its call returns; on an
XPU it is work on torch's current stream, like torch's own. XPU support is written from torch's sources
and has not yet run on an Intel GPU.

The operations are registered with torch (``torch.ops.kvcache_dpex``) with their mutated arguments and
fake implementations. They have no gradient: in grad mode an argument that requires one is refused.

torch knows no read-only memory: a tensor made by ``torch.from_numpy`` of a read-only array is written.
Where a compiled function itself takes views of a buffer, such as its K and V halves, let only the number
of tokens be dynamic, not the buffer: inductor loses the offset of a view of symbolic size (PyTorch issue
198068).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch, formats
from .layout import cache_shape
from .runtime.launch.exchange import from_torch, to_torch
from .runtime.launch.tensors import dtype_of

__all__ = [
    "dequant_cache",
    "empty_cache",
    "empty_quant_cache",
    "from_torch",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "reshape_and_cache_quant",
    "to_torch",
]


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """A key cache and a value cache of zeros, ``[num_blocks, block_size, num_kv_heads, head_size]``.

    `dtype` is any of 1, 2, 4 or 8 bytes; `device` is by default the XPU, or the CPU where torch has none.

    Examples
    --------
    >>> key_cache, value_cache = empty_cache(256, 16, 8, 128, dtype=torch.bfloat16, device="cpu")
    >>> key_cache.shape
    torch.Size([256, 16, 8, 128])
    """
    sizes = (head_size, head_size if value_head_size is None else value_head_size)
    shapes = [cache_shape(num_blocks, block_size, num_kv_heads, size) for size in sizes]
    key_cache, value_cache = (_zeros(shape, dtype_of(dtype), device) for shape in shapes)
    return key_cache, value_cache


def empty_quant_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    format: str = "int8_per_token_head",
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caches of codes and their float32 scales ``[num_blocks * block_size, num_kv_heads]``, all zeros.

    Codes are int8, or float8_e4m3fn where `format` is ``"fp8_per_token_head"``.

    Examples
    --------
    >>> kq, vq, ks, vs = empty_quant_cache(256, 16, 8, 128, device="cpu")
    >>> kq.dtype, ks.shape
    (torch.int8, torch.Size([4096, 8]))
    """
    kq, vq = empty_cache(
        num_blocks,
        block_size,
        num_kv_heads,
        head_size,
        value_head_size=value_head_size,
        dtype=formats.quantized(format).dtype,
        device=device,
    )
    ks, vs = (_zeros((num_blocks * block_size, num_kv_heads), torch.float32, device) for _ in range(2))
    return kq, vq, ks, vs


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    check_slots: bool = False,
) -> None:
    """Copy row ``token`` of `key` and `value` to slot ``slot_mapping[token]`` of the caches, in place.

    As `kvcache_dpex.reshape_and_cache`, on tensors of any dtype of 1, 2, 4 or 8 bytes.

    Examples
    --------
    >>> key_cache, value_cache = empty_cache(4, 16, 8, 128, device="cpu")
    >>> key, value = torch.ones(2, 8, 128), torch.zeros(2, 8, 128)
    >>> reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([17, -1]))
    >>> key_cache.sum(), key_cache[1, 1].sum()
    (tensor(1024.), tensor(1024.))
    """
    run = dispatch.write if _is_plain(key) else dispatch.operations.reshape_and_cache
    run(key, value, key_cache, value_cache, slot_mapping, check_slots=check_slots)


def reshape_and_cache_quant(
    key: Tensor,
    value: Tensor,
    kq: Tensor,
    vq: Tensor,
    ks: Tensor,
    vs: Tensor,
    slot_mapping: Tensor,
    *,
    check_slots: bool = False,
) -> None:
    """Quantize row ``token`` of `key` and `value` into slot ``slot_mapping[token]``, in place.

    As `kvcache_dpex.reshape_and_cache_quant`, on float32, float16 or bfloat16 tensors.

    Examples
    --------
    >>> kq, vq, ks, vs = empty_quant_cache(4, 16, 1, 4, device="cpu")
    >>> key = torch.tensor([[[-127.0, 0.5, 1.5, 63.0]]])
    >>> reshape_and_cache_quant(key, key, kq, vq, ks, vs, torch.tensor([17]))
    >>> kq[1, 1, 0], ks[17]
    (tensor([-127,    0,    2,   63], dtype=torch.int8), tensor([1.]))
    """
    run = dispatch.write_quant if _is_plain(key) else dispatch.operations.reshape_and_cache_quant
    run(key, value, kq, vq, ks, vs, slot_mapping, check_slots=check_slots)


def dequant_cache(
    q: Tensor,
    scales: Tensor,
    *,
    dtype: torch.dtype | str | None = None,
    out: Tensor | None = None,
    blocks: Tensor | None = None,
) -> Tensor:
    """Decode int8 or fp8 codes: ``float32(code) * scale``, rounded once to `dtype` (by default float32).

    As `kvcache_dpex.dequant_cache`: into `out` where it is given, and only `blocks` where those are.

    Examples
    --------
    >>> kq, vq, ks, vs = empty_quant_cache(4, 16, 8, 128, device="cpu")
    >>> dequant_cache(kq, ks, dtype=torch.bfloat16, blocks=torch.tensor([2, 0])).shape
    torch.Size([2, 16, 8, 128])
    """
    wanted = None if dtype is None else dtype_of(dtype)
    if out is not None:
        if wanted not in (None, out.dtype):
            raise TypeError(f"`out` must have `dtype` {wanted}, got {out.dtype}")
        into = dispatch.decode_into if _is_plain(q) else dispatch.operations.dequant_cache_out
        into(q, scales, out, blocks)
        return out
    run = dispatch.decode if _is_plain(q) else dispatch.operations.dequant_cache
    return run(q, scales, wanted, blocks)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """vLLM's name and argument order for both writes.

    ``"auto"`` copies, and the scales are not looked at. ``"int8_per_token_head"`` quantizes, and the
    scales are caches of their own, ``[num_blocks, block_size, num_kv_heads]`` float32.
    """
    run = dispatch.write_flash if _is_plain(key) else dispatch.operations.reshape_and_cache_flash
    run(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device or ("xpu" if torch.xpu.is_available() else "cpu"))


_is_compiling = torch.compiler.is_dynamo_compiling
_count_of_modes = torch._C._len_torch_dispatch_stack


def _is_plain(first: Any) -> bool:
    """Whether a call can do without torch's dispatcher, which a trace or a subclass needs."""
    if _is_compiling() or _count_of_modes():
        return False
    if type(first) is Tensor:
        return True
    if not isinstance(first, Tensor):
        raise TypeError(
            f"arguments must be torch.Tensor, got {type(first).__module__}.{type(first).__qualname__}; "
            "kvcache_dpex itself has the same operations for dpnp arrays"
        )
    return False
