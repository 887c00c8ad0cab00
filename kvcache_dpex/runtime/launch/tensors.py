"""Torch tensors as operands: a launch takes the addresses of their memory, on CPU and XPU alike."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..environment import devices
from . import xpu
from .readers import Package, Reader, Unreadable, register

if TYPE_CHECKING:
    import dpctl

_cpu_queue: dpctl.SyclQueue | None = None
_making = threading.Lock()


def _find_readers(tensor: torch.Tensor) -> tuple[Reader, Reader]:
    """`read`, for a type whose tensors have memory; a type that redefines dispatch may have none."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unreadable(
            f"must be an ordinary torch.Tensor, got {kind.__module__}.{kind.__qualname__}, a stand-in"
        )
    return read, read


def read(tensor: torch.Tensor) -> tuple[int, tuple]:
    """Pointer and `Operand` fields of a tensor."""
    if tensor.is_cpu:
        queue = _cpu_queue or _make_cpu_queue()
    elif tensor.is_xpu:
        queue = xpu.current_queue(tensor.device.index)
    else:
        raise Unreadable(f"must be on the CPU or an XPU, got a tensor on {tensor.device}")
    if tensor.is_neg():
        raise Unreadable("must hold its own values, got a negated view; .resolve_neg() makes one that does")
    if tensor.dtype.is_complex and tensor.is_conj():
        raise Unreadable(
            "must hold its own values, got a conjugate view; .resolve_conj() makes one that does"
        )
    try:
        pointer, kind = tensor.data_ptr(), (tensor.shape, tensor.stride(), tensor.dtype)
        offset, available = tensor.storage_offset(), tensor.untyped_storage().nbytes()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise Unreadable(f"must be dense, in memory of its own, got {tensor.layout} ({reason})") from error
    needed = _extents.get(kind)
    if needed is None:
        needed = _extent(*kind)
    offset *= kind[2].itemsize
    if needed and (offset + needed > available or pointer == offset):
        raise Unreadable(_without_memory(tensor, offset + needed, available))
    return pointer, (*kind, queue)


_extents: dict[tuple, int] = {}  # working them out costs more than the rest of `read`


def _extent(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes from the first element of a tensor to the end of its last one; 0 without elements."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides))
    extent = 0 if 0 in shape else (last + 1) * dtype.itemsize
    if len(_extents) >= 4096:
        _extents.clear()
    _extents[shape, strides, dtype] = extent
    return extent


def _without_memory(tensor: torch.Tensor, needed: Any, available: int) -> str:
    if torch._is_functional_tensor(tensor):
        return "must have memory, got a tensor inside torch.func.functionalize, which has none"
    if tensor._is_zerotensor():
        return "must have memory, got a zero tensor, which has none; .clone() makes one that has"
    return (
        f"must lie in its storage, got a tensor that needs {needed} bytes of a storage of {available}, which "
        "was resized or freed; allocate it again"
    )


def _make_cpu_queue() -> dpctl.SyclQueue:
    """The queue for tensors in ordinary memory, which the CPU device reads and writes as it is."""
    global _cpu_queue
    with _making:
        _cpu_queue = _cpu_queue or _cpu_queue_of_device()
    return _cpu_queue


def _cpu_queue_of_device() -> dpctl.SyclQueue:
    dpctl = devices.load_dpctl()
    if not any(device.is_cpu for device in dpctl.get_devices()):
        raise RuntimeError(
            "tensors on the CPU need SYCL's CPU device, and none was found: pip install intel-opencl-rt"
        )
    device = devices.queue_for("cpu").sycl_device
    if not device.has_aspect_usm_system_allocations:
        raise RuntimeError(
            f"{device.name} does not reach ordinary memory (aspect usm_system_allocations), so tensors on "
            "the CPU cannot be used; arrays of kvcache_dpex.empty_cache can"
        )
    return dpctl.SyclQueue(device, property="in_order")


# dtypes that NumPy has not: their bits are shown as unsigned integers.
_BITS = {1: torch.uint8, 2: torch.uint16}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy on the host, bits where NumPy lacks the dtype, after all work that writes the tensor."""
    host = tensor.detach().cpu()
    try:
        return host.numpy().copy()
    except TypeError:
        return host.view(_BITS[host.itemsize]).numpy().copy()


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype, from its name too.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"`dtype` must be a torch.dtype or its name, got {dtype!r}")
    return found


def empty_like(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | str) -> torch.Tensor:
    """An uninitialised tensor on the same device."""
    return torch.empty(shape, dtype=dtype_of(dtype), device=tensor.device)


def of_host(tensor: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """The values of a NumPy array on the device of a tensor."""
    found = torch.from_numpy(values)
    return found if tensor.is_cpu else found.pin_memory().to(tensor.device, non_blocking=True)


register("tensors", Package(_find_readers, empty_like, to_numpy, of_host))
