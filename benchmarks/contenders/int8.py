"""Writes that quantize: reshape_and_cache_quant and its rivals, all by the same formula."""

from __future__ import annotations

from typing import Any

import kvcache_dpex as kv

from ..work import Contender, Work
from . import COMPILED, EAGER, OURS, OURS_COMPILED, OURS_TORCH, compiled, device_copy, entry, torch_operations


@entry("int8", OURS, "ours")
def _(work: Work) -> Contender:
    arguments, dtype = work.arrays, "bfloat16" if work.case.dtype == "bfloat16" else None
    return work.on_device(lambda: kv.reshape_and_cache_quant(**arguments, dtype=dtype))


@entry("int8", OURS_TORCH, "ours")
def _(work: Work) -> Contender:
    arguments, operation = work.tensors, torch_operations().reshape_and_cache_quant
    return work.on_torch(lambda: operation(**arguments))


@entry("int8", OURS_COMPILED, "ours")
def _(work: Work) -> Contender:
    arguments, operation = work.tensors, torch_operations().reshape_and_cache_quant
    run = compiled(work, lambda **given: operation(**given))
    return work.on_torch(lambda: run(**arguments))


def quantize(rows: Any) -> tuple[Any, Any]:
    """Codes and scales of finite rows."""
    values = rows.float()
    scales = values.abs().amax(-1) / 127
    codes = (values / scales[..., None]).round().clamp(-127, 127)
    return codes.where(scales[..., None] > 0, 0).char(), scales


def quantized_write(key: Any, value: Any, kq: Any, vq: Any, ks: Any, vs: Any, slot_mapping: Any) -> None:
    """The write as eager code has it, the index built once for keys and values."""
    block_size = kq.shape[1]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    kq[block, offset], ks[slot_mapping] = quantize(key)
    vq[block, offset], vs[slot_mapping] = quantize(value)


@entry("int8", f"{EAGER}, block + offset")
def _(work: Work) -> Contender:
    arguments = work.tensors
    return work.on_torch(lambda: quantized_write(**arguments))


@entry("int8", COMPILED)
def _(work: Work) -> Contender:
    arguments, run = work.tensors, compiled(work, quantized_write)
    return work.on_torch(lambda: run(**arguments))


@entry("int8", "copy of the same bytes, torch", "copy")
def _(work: Work) -> Contender:
    half = work.torch.zeros(
        work.case.num_bytes // 2, dtype=work.torch.uint8, device=work.tensors["key"].device
    )
    other = half.clone()
    return work.on_torch(lambda: other.copy_(half), ())


@entry("int8", "copy of the same bytes, SYCL", "copy")
def _(work: Work) -> Contender:
    return device_copy(work, work.case.num_bytes // 2)
