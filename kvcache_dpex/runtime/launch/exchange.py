"""Arrays as tensors and tensors as arrays, in the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..environment import devices
from . import arrays, launch, xpu


def to_torch(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor in the memory of a dpnp array or usm_ndarray; what one changes, the other shows.

    Work that the array's queue still runs is waited for. What is submitted afterwards is not: wait on
    ``array.sycl_queue`` before torch reads what such work writes.

    Parameters
    ----------
    array
        On the CPU device, of any USM type; or on an Intel GPU, of USM type ``"device"`` and in the
        default context of its platform, as dpnp allocates. The tensor keeps the memory alive.
    dtype
        A dtype of the same width to read the bits as: ``torch.bfloat16`` of uint16 arrays,
        ``torch.float8_e4m3fn`` of uint8 arrays. By default the array's own.

    Raises
    ------
    TypeError
        `array` is neither, torch has no such dtype, or `dtype` is of another width.
    ValueError
        `array` has negative strides or is read-only, which a tensor cannot be, or its memory is not
        torch's to use.

    Examples
    --------
    >>> import kvcache_dpex
    >>> key_cache, value_cache = kvcache_dpex.empty_cache(4, 16, 8, 128, dtype="bfloat16", device="cpu")
    >>> to_torch(key_cache, torch.bfloat16).dtype
    torch.bfloat16
    """
    launch.refuse_after_fork()
    if not hasattr(type(array), "__sycl_usm_array_interface__"):
        raise TypeError(f"`array` must be a dpnp array or a usm_ndarray, got {_name_of(array)}")
    usm = array.get_array() if hasattr(array, "get_array") else array
    if any(stride < 0 for stride in usm.strides):
        raise ValueError(
            f"`array` must have strides >= 0, got {list(usm.strides)}, and torch has no negative ones; "
            "pass array.copy()"
        )
    if not usm.flags.writable:
        raise ValueError("`array` must be writable, for a tensor always is; pass array.copy()")
    if dtype is not None and dtype.itemsize != usm.dtype.itemsize:
        raise TypeError(f"`dtype` must be as wide as {usm.dtype}, the dtype of `array`, got {dtype}")
    usm.sycl_queue.wait()
    device = usm.sycl_device
    if device.is_cpu:
        tensor = torch.from_numpy(np.asarray(_HostMemory(usm)))
    elif device.is_gpu and torch.xpu.is_available():
        tensor = xpu.import_array(usm)
    else:
        raise ValueError(
            f"`array` is on {device.name}, which this torch {torch.__version__} does not reach; pass a copy "
            "on the CPU, array.to_device('cpu')"
        )
    return tensor if dtype is None else tensor.view(dtype)


class _HostMemory:
    """Memory of the CPU device, which is the host's, in NumPy's terms; keeps its array alive."""

    def __init__(self, usm: Any) -> None:
        self._usm = usm
        self.__array_interface__ = {
            "version": 3,
            "data": (usm._pointer, False),
            "shape": usm.shape,
            "strides": tuple(stride * usm.dtype.itemsize for stride in usm.strides),
            "typestr": usm.dtype.str,
        }


def from_torch(tensor: torch.Tensor) -> Any:
    """A dpnp array in the memory of a tensor; what one changes, the other shows.

    The memory must be SYCL's own: that of every tensor on an XPU, and on the CPU that of a tensor that
    `to_torch` made. Ordinary memory of the CPU is none; operations of `kvcache_dpex` take such tensors
    as they are.

    The array is on dpnp's queue of the device. Work that torch's current stream still runs is waited
    for; later work of torch and of dpnp is ordered by nobody but the caller.

    Parameters
    ----------
    tensor
        Any shape and strides. bfloat16 comes out as uint16 and float8 as uint8, which hold the bits.

    Raises
    ------
    TypeError
        `tensor` is no dense tensor.
    ValueError
        `tensor` requires a gradient, is a conjugated or negated view, or is not in SYCL's memory.

    Examples
    --------
    >>> import kvcache_dpex
    >>> key_cache, value_cache = kvcache_dpex.empty_cache(4, 16, 8, 128, device="cpu")
    >>> from_torch(to_torch(key_cache)[1]).shape
    (16, 8, 128)
    """
    launch.refuse_after_fork()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`tensor` must be a torch.Tensor, got {_name_of(tensor)}")
    if tensor.requires_grad:
        raise ValueError("`tensor` must not require a gradient, which an array cannot; pass tensor.detach()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "`tensor` must hold its own values, got a conjugated or negated view; pass "
            "tensor.resolve_conj().resolve_neg()"
        )
    address, operand = arrays.read(tensor, "tensor")
    queue = devices.queue_for(arrays.Operand(*operand).queue.sycl_device)
    if tensor.is_xpu:
        xpu.wait(tensor.device.index)
    dtype = arrays.storage_dtype(tensor.dtype)
    module = arrays.tensor_module()
    if tensor.numel() == 0:
        return arrays.as_dpnp(module.empty(tuple(tensor.shape), dtype=dtype, sycl_queue=queue))
    array = module.usm_ndarray(
        tuple(tensor.shape),
        dtype=dtype,
        buffer=_memory_of(tensor, address, queue),
        strides=tensor.stride(),
    )
    return arrays.as_dpnp(array)


def _memory_of(tensor: torch.Tensor, address: int, queue: Any) -> Any:
    from dpctl.memory import as_usm_memory

    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    try:
        return as_usm_memory(_SyclMemory(tensor, address, (last + 1) * tensor.itemsize, queue))
    except ValueError as error:
        raise ValueError(
            f"`tensor` must be in memory that SYCL allocated on {queue.sycl_device.name}, and this is not "
            "(operations of kvcache_dpex take it as it is); to_torch(kvcache_dpex.empty_cache(...)[0]) "
            "makes tensors that are, dpnp.asarray(tensor.numpy()) copies"
        ) from error


class _SyclMemory:
    """A tensor's memory in dpctl's terms; keeps the tensor alive."""

    def __init__(self, tensor: torch.Tensor, address: int, size: int, queue: Any) -> None:
        self._tensor = tensor
        self.__sycl_usm_array_interface__ = {
            "version": 1,
            "data": (address, False),
            "shape": (size,),
            "strides": None,
            "typestr": "|u1",
            "syclobj": queue,
        }


def _name_of(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
