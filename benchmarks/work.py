"""The inputs of a case, on the host, on the device and as tensors, and what must come out."""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

import numpy as np

import kvcache_dpex as kv
from kvcache_dpex import reference
from kvcache_dpex.runtime.launch import arrays

from .presets import Case

SENTINEL = 0xA5


class Absent(Exception):
    """Why a contender cannot take part."""


class Wrong(Exception):
    """A contender's output is not the reference's."""


class Contender(NamedTuple):
    """Something to be timed: `run` does the work, `finish` waits for it, `outputs` are what it wrote."""

    run: Callable[[], Any]
    outputs: Callable[[], tuple[Any, ...]]
    device: str
    finish: Callable[[], Any] | None = None


class Work:
    """One case: its arrays by name, and the reference's outputs.

    Inputs come first in `names`, outputs last; all contenders on one kind of array share them.
    """

    def __init__(self, case: Case, queue: Any) -> None:
        self.case, self.queue = case, queue
        self.sycl_device = _kind_of(queue.sycl_device)
        rng = np.random.default_rng(1)
        shape = (case.num_blocks, case.block_size, case.heads, case.size)
        slots = case.num_blocks * case.block_size
        if case.operation == "dequantize":
            inputs = {
                "q": rng.integers(-127, 128, shape, dtype=np.int8),
                "scales": rng.random((slots, case.heads), dtype=np.float32),
            }
            outputs = {"out": np.empty(shape, arrays.storage_dtype(case.dtype))}
        else:
            rows = (case.tokens, case.heads, case.size)
            slot_mapping = case.slot_mapping(rng)
            inputs = {"key": _rows(rng, rows, case.dtype), "value": _rows(rng, rows, case.dtype)}
            inputs["slot_mapping"] = slot_mapping.astype(np.int64)
            if case.operation == "fp8":
                inputs |= {name: np.array([0.01], np.float32) for name in ("k_scale", "v_scale")}
                outputs = {name: np.empty(shape, np.uint8) for name in ("key_cache", "value_cache")}
            elif case.operation == "int8":
                outputs = {name: np.empty(shape, np.int8) for name in ("kq", "vq")}
                outputs |= {name: np.empty((slots, case.heads), np.float32) for name in ("ks", "vs")}
            else:
                outputs = {
                    name: np.empty(shape, inputs["key"].dtype) for name in ("key_cache", "value_cache")
                }
        self.output_names = list(outputs)
        self.host = {**inputs, **outputs}

    @functools.cached_property
    def expected(self) -> list[np.ndarray]:
        """The outputs as the reference leaves them, over the sentinel."""
        given = {name: array.copy() for name, array in self.host.items()}
        for name in self.output_names:
            _bytes(given[name])[:] = SENTINEL
        case = self.case
        if case.operation == "write":
            reference.reshape_and_cache(**given)
        elif case.operation == "int8":
            reference.reshape_and_cache_quant(**given, dtype=case.dtype)
        elif case.operation == "fp8":
            reference.reshape_and_cache_fp8(**given, dtype=case.dtype, format="fp8_e4m3")
        else:
            given["out"] = reference.dequant_cache(given["q"], given["scales"], dtype=case.dtype)
        return [given[name] for name in self.output_names]

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        """dpnp arrays on the device."""
        module = arrays.tensor_module()
        return {
            name: arrays.as_dpnp(module.asarray(array, sycl_queue=self.queue))
            for name, array in self.host.items()
        }

    @functools.cached_property
    def tensors(self) -> dict[str, Any]:
        """torch tensors, on the XPU where the device is one that torch reaches, else on the CPU."""
        torch = self.torch
        made = {name: torch.from_numpy(array.copy()) for name, array in self.host.items()}
        if self.case.dtype == "bfloat16":
            made = {n: t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for n, t in made.items()}
        return {name: tensor.to(self.torch_device.lower()) for name, tensor in made.items()}

    @property
    def torch(self) -> Any:
        """The module torch."""
        try:
            import torch
        except ImportError:
            raise Absent("torch is not installed") from None
        return torch

    @property
    def torch_device(self) -> str:
        """Where tensors are: "XPU" or "CPU"."""
        return "XPU" if self.sycl_device == "GPU" and self.torch.xpu.is_available() else "CPU"

    def on_device(
        self, run: Callable[[], Any], outputs: tuple[Any, ...] | None = None, *, waits: bool | None = None
    ) -> Contender:
        """A contender on `arrays`, which writes theirs unless it names others.

        Whether a call `waits` for its work itself; this package's do on a CPU.
        """
        chosen = tuple(self.arrays[name] for name in self.output_names) if outputs is None else outputs
        if waits is None:
            waits = self.sycl_device == "CPU"
        return Contender(run, lambda: chosen, self.sycl_device, None if waits else self.queue.wait)

    def on_torch(self, run: Callable[[], Any], outputs: tuple[Any, ...] | None = None) -> Contender:
        """A contender on `tensors`, which writes theirs unless it names others."""
        chosen = tuple(self.tensors[name] for name in self.output_names) if outputs is None else outputs
        finish = self.torch.xpu.synchronize if self.torch_device == "XPU" else None
        return Contender(run, lambda: chosen, self.torch_device, finish)

    def on_host(self, run: Callable[[], Any]) -> Contender:
        """A contender on `host`."""
        return Contender(run, lambda: tuple(self.host[name] for name in self.output_names), "CPU")

    def verify(self, contender: Contender) -> None:
        """Run once over outputs full of the sentinel; every byte must be the reference's."""
        for output in contender.outputs():
            _fill(output)
        contender.run()
        if contender.finish:
            contender.finish()
        for name, output, expected in zip(self.output_names, contender.outputs(), self.expected):
            found = output if isinstance(output, np.ndarray) else arrays.to_numpy(output)
            differs = np.count_nonzero(_bytes(found) != _bytes(expected))
            if found.nbytes != expected.nbytes or differs:
                raise Wrong(f"`{name}` differs from the reference in {differs} of {expected.nbytes} bytes")


def _rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normally distributed rows, the first of them zero; bfloat16 as the bits that hold it."""
    if np.dtype(arrays.storage_dtype(dtype)).kind == "i":
        return rng.integers(-128, 128, shape, dtype=dtype)
    rows = rng.standard_normal(shape, dtype=np.float32)
    rows[0, 0] = 0
    return reference.from_float32(rows, dtype)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _fill(output: Any) -> None:
    """Put the sentinel into every byte of an output."""
    if isinstance(output, np.ndarray):
        _bytes(output)[:] = SENTINEL
    elif arrays.is_tensor(output):
        whole = output.new_empty(output.shape)
        whole.view(output.new_empty(0).byte().dtype).fill_(SENTINEL)
        output.copy_(whole)
    else:
        output.get_array().usm_data.copy_from_host(np.full(output.nbytes, SENTINEL, np.uint8))


def _kind_of(device: Any) -> str:
    return "CPU" if device.is_cpu else "GPU" if device.is_gpu else str(device.device_type)


def queue_for(device: str | None) -> Any:
    """The queue of a device, as `kvcache_dpex.empty_cache` chooses it."""
    return kv.empty_cache(1, 1, 1, 1, device=device)[0].sycl_queue
