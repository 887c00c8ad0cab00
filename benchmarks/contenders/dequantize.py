"""Decoding int8 codes: dequant_cache and its rivals."""

from __future__ import annotations

from typing import Any

import kvcache_dpex as kv

from ..work import Contender, Work
from . import COMPILED, EAGER, OURS, OURS_TORCH, compiled, device_copy, entry, torch_operations


@entry("dequantize", OURS, "ours")
def _(work: Work) -> Contender:
    arguments, dtype = work.arrays, work.case.dtype
    return work.on_device(lambda: kv.dequant_cache(**arguments, dtype=dtype))


@entry("dequantize", OURS_TORCH, "ours")
def _(work: Work) -> Contender:
    arguments, operation = work.tensors, torch_operations().dequant_cache
    return work.on_torch(lambda: operation(**arguments))


@entry("dequantize", f"{OURS_TORCH}, new tensor", "ours")
def _(work: Work) -> Contender:
    t, operation = work.tensors, torch_operations().dequant_cache
    return _allocating(work, lambda: operation(t["q"], t["scales"], dtype=t["out"].dtype))


def decode(q: Any, scales: Any, out: Any) -> Any:
    """Codes times scales, in a new tensor of the dtype of `out`."""
    return (q.float() * scales.reshape(q.shape[:3])[..., None]).to(out.dtype)


def _allocating(work: Work, run: Any) -> Contender:
    """A contender whose output is whatever it returned last."""
    last = work.tensors["out"]

    def keep() -> None:
        nonlocal last
        last = run()

    return work.on_torch(keep)._replace(outputs=lambda: (last,))


@entry("dequantize", EAGER)
def _(work: Work) -> Contender:
    arguments = work.tensors
    return _allocating(work, lambda: decode(**arguments))


@entry("dequantize", "torch.mul(out=)")
def _(work: Work) -> Contender:
    t = work.tensors
    scales = t["scales"].reshape(t["q"].shape[:3])[..., None]
    return work.on_torch(lambda: work.torch.mul(t["q"], scales, out=t["out"]))


@entry("dequantize", COMPILED)
def _(work: Work) -> Contender:
    arguments, run = work.tensors, compiled(work, decode)
    return _allocating(work, lambda: run(**arguments))


@entry("dequantize", "copy of the same bytes, torch", "copy")
def _(work: Work) -> Contender:
    half = work.torch.zeros(work.case.num_bytes // 2, dtype=work.torch.uint8, device=work.tensors["q"].device)
    other = half.clone()
    return work.on_torch(lambda: other.copy_(half), ())


@entry("dequantize", "copy of the same bytes, SYCL", "copy")
def _(work: Work) -> Contender:
    return device_copy(work, work.case.num_bytes // 2)
