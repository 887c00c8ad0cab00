"""The operations as torch's dispatcher knows them: schemas, implementations, fakes, a word to autograd.

Importing this registers them under ``torch.ops.kvcache_dpex``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .ops.dequantize import dequant_cache
from .ops.quantize import reshape_and_cache_quant
from .ops.write import reshape_and_cache

_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled


def write(key, value, key_cache, value_cache, slot_mapping, *, check_slots=False) -> None:
    if _grad_enabled():
        _refuse_gradients("key value key_cache value_cache", key, value, key_cache, value_cache)
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, check_slots=check_slots)
    # Autograd then notices where it had saved a cache; inference mode saves none.
    if not _inference():
        increment_version((key_cache, value_cache))


def write_quant(key, value, kq, vq, ks, vs, slot_mapping, *, check_slots=False) -> None:
    if _grad_enabled():
        _refuse_gradients("key value ks vs", key, value, ks, vs)
    reshape_and_cache_quant(key, value, kq, vq, ks, vs, slot_mapping, check_slots=check_slots)
    if not _inference():
        increment_version((kq, vq, ks, vs))


def write_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale) -> None:
    if kv_cache_dtype == "auto":
        write(key, value, key_cache, value_cache, slot_mapping)
    elif kv_cache_dtype == "int8_per_token_head":
        write_quant(key, value, key_cache, value_cache, k_scale, v_scale, slot_mapping)
    else:
        raise ValueError(f"`kv_cache_dtype` must be 'auto' or 'int8_per_token_head', got {kv_cache_dtype!r}")


def decode(q, scales, dtype=None, blocks=None) -> Tensor:
    if _grad_enabled():
        _refuse_gradients("scales", scales)
    return dequant_cache(q, scales, dtype=dtype, blocks=blocks)


def decode_into(q, scales, out, blocks=None) -> None:
    if _grad_enabled():
        _refuse_gradients("scales out", scales, out)
    dequant_cache(q, scales, out=out, blocks=blocks)
    if not _inference():
        increment_version(out)


def _refuse_gradients(names: str, *tensors: Any) -> None:
    # Names in one string, for a dict of them takes half a microsecond of every call.
    for number, tensor in enumerate(tensors):
        if getattr(tensor, "requires_grad", False):
            name = names.split()[number]
            raise ValueError(
                f"`{name}` must not require a gradient, for this operation has none; pass {name}.detach() or "
                "call it under torch.no_grad()"
            )


def _write_fake(key, value, *others: Any, **options: Any) -> None:
    if _grad_enabled():
        _refuse_gradients("key value", key, value)


def _decode_fake(q: Tensor, scales: Tensor, dtype=None, blocks=None) -> Tensor:
    leading = q.shape[:1] if blocks is None else blocks.shape
    return q.new_empty((*leading, *q.shape[1:]), dtype=dtype or torch.float32)


def _decode_into_fake(q: Tensor, scales: Tensor, out: Tensor, blocks=None) -> None:
    return None


# A copy of the package under another name, as the kernels hub makes them, has operations of its own.
_NAMESPACE = __name__.rpartition(".")[0].replace(".", "_")
_library = torch.library.Library(_NAMESPACE, "DEF")

for _schema, _run, _fake in (
    (
        "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, *, bool check_slots=False) -> ()",
        write,
        _write_fake,
    ),
    (
        "reshape_and_cache_quant(Tensor key, Tensor value, Tensor(a!) kq, Tensor(b!) vq, Tensor(c!) ks, "
        "Tensor(d!) vs, Tensor slot_mapping, *, bool check_slots=False) -> ()",
        write_quant,
        _write_fake,
    ),
    (
        # vLLM's, and the scales are written where the cache is int8.
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, Tensor(c!) k_scale, Tensor(d!) v_scale) -> ()",
        write_flash,
        _write_fake,
    ),
    (
        "dequant_cache(Tensor q, Tensor scales, ScalarType? dtype=None, Tensor? blocks=None) -> Tensor",
        decode,
        _decode_fake,
    ),
    (
        "dequant_cache_out(Tensor q, Tensor scales, Tensor(a!) out, Tensor? blocks=None) -> ()",
        decode_into,
        _decode_into_fake,
    ),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)
    for _key in ("CPU", "XPU"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"{_NAMESPACE}::{_name}", _fake, lib=_library)

operations = getattr(torch.ops, _NAMESPACE)
