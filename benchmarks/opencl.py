"""A launch of the CPU device without SYCL: what SYCL's share of a launch is."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Callable

from kvcache_dpex.runtime.compile.store import Module
from kvcache_dpex.runtime.launch import launch

from .work import Absent


class LaunchOfModule(launch.Launch):
    """A launch that still knows its module."""

    def __init__(self, module: Module, *arguments: Any) -> None:
        super().__init__(module, *arguments)
        self.module = module


def opencl_launch(prepared: LaunchOfModule, pointers: tuple[int, ...]) -> Callable[[], None]:
    """What a launch of the CPU device does with a kernel that takes a record, by OpenCL's own functions."""
    module = prepared.module
    assert module.in_record
    library, context, device, queue = _opencl()
    error = ctypes.c_int()
    length = ctypes.c_size_t(len(module.binary))
    program = ctypes.c_void_p(
        library.clCreateProgramWithIL(context, module.binary, length, ctypes.byref(error))
    )
    library.clBuildProgram(program, 1, ctypes.byref(device), b"", None, None)
    kernel = library.clCreateKernel(program, module.name.replace("-", "_").encode(), ctypes.byref(error))
    if error.value:
        raise Absent(f"clCreateKernel gives {error.value}")
    kernel = ctypes.c_void_p(kernel)
    arguments = prepared._packer.pack(pointers)
    address = ctypes.c_int64(ctypes.addressof(arguments.memory))
    size = ctypes.c_size_t * len(prepared._global)
    items, group = size(*prepared._global[::-1]), size(*prepared._local[::-1])
    axes, none = ctypes.c_uint(len(prepared._global)), ctypes.c_uint(0)
    first, word = ctypes.c_uint(0), ctypes.c_size_t(8)
    set_argument, enqueue, finish = library.clSetKernelArg, library.clEnqueueNDRangeKernel, library.clFinish

    def run() -> None:
        prepared._packer.pack_into(arguments.memory, 0, *pointers)
        set_argument(kernel, first, word, ctypes.byref(address))
        enqueue(queue, kernel, axes, None, items, group, none, None, None)
        finish(queue)

    return run


@functools.cache
def _opencl() -> tuple[Any, Any, Any, Any]:
    """OpenCL's library, and a context and a queue of its first CPU device."""
    library = ctypes.CDLL("libOpenCL.so.1")
    for name in ("Context", "CommandQueueWithProperties", "ProgramWithIL", "Kernel"):
        getattr(library, f"clCreate{name}").restype = ctypes.c_void_p
    platforms, device, count = (ctypes.c_void_p * 8)(), ctypes.c_void_p(), ctypes.c_uint()
    library.clGetPlatformIDs(8, platforms, ctypes.byref(count))
    cpu = ctypes.c_ulong(2)
    for platform in platforms[: count.value]:
        if not library.clGetDeviceIDs(ctypes.c_void_p(platform), cpu, 1, ctypes.byref(device), None):
            break
    else:
        raise Absent("OpenCL has no CPU device")
    context = ctypes.c_void_p(library.clCreateContext(None, 1, ctypes.byref(device), None, None, None))
    queue = library.clCreateCommandQueueWithProperties(context, device, None, None)
    return library, context, device, ctypes.c_void_p(queue)
