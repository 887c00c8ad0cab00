"""Writes of e4m3 codes by a given scale: reshape_and_cache_fp8 and its rivals, all by the same formula."""

from __future__ import annotations

from typing import Any

import kvcache_dpex as kv

from ..work import Contender, Work
from . import COMPILED, EAGER, OURS, OURS_COMPILED, OURS_TORCH, compiled, device_copy, entry, torch_operations

FORMAT = "fp8_e4m3"


@entry("fp8", OURS, "ours")
def _(work: Work) -> Contender:
    arguments, dtype = work.arrays, "bfloat16" if work.case.dtype == "bfloat16" else None
    return work.on_device(lambda: kv.reshape_and_cache_fp8(**arguments, dtype=dtype, format=FORMAT))


@entry("fp8", OURS_TORCH, "ours")
def _(work: Work) -> Contender:
    arguments, operation = work.tensors, torch_operations().reshape_and_cache_fp8
    return work.on_torch(lambda: operation(**arguments, format=FORMAT))


@entry("fp8", OURS_COMPILED, "ours")
def _(work: Work) -> Contender:
    arguments, operation = work.tensors, torch_operations().reshape_and_cache_fp8
    run = compiled(work, lambda **given: operation(**given, format=FORMAT))
    return work.on_torch(lambda: run(**arguments))


def cast(rows: Any, scale: Any, torch: Any) -> Any:
    """Codes, as their bits."""
    return (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def cast_write(work: Work) -> Any:
    """The write as eager code has it, the index built once for keys and values."""
    torch = work.torch

    def write(
        key: Any, value: Any, key_cache: Any, value_cache: Any, k_scale: Any, v_scale: Any, slot_mapping: Any
    ) -> None:
        block_size = key_cache.shape[1]
        block, offset = slot_mapping // block_size, slot_mapping % block_size
        key_cache[block, offset] = cast(key, k_scale, torch)
        value_cache[block, offset] = cast(value, v_scale, torch)

    return write


@entry("fp8", f"{EAGER}, block + offset")
def _(work: Work) -> Contender:
    arguments, write = work.tensors, cast_write(work)
    return work.on_torch(lambda: write(**arguments))


@entry("fp8", COMPILED)
def _(work: Work) -> Contender:
    arguments, run = work.tensors, compiled(work, cast_write(work))
    return work.on_torch(lambda: run(**arguments))


@entry("fp8", "copy of the same bytes, SYCL", "copy")
def _(work: Work) -> Contender:
    return device_copy(work, work.case.num_bytes // 2)
