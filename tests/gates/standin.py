"""Runs the public operations over memory that is not SYCL's, through a launcher of one's choice.

The operations validate, choose the kernel and work out the index space as they do on a GPU; only the
last step, the launch of a module with pointers and scalars, is somebody else's.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from kvcache_dpex.ops.calls import launch_of
from kvcache_dpex.ops.operation import using
from kvcache_dpex.runtime.compile.store import Module
from kvcache_dpex.runtime.launch import scratch

from .cases import Case


class Device:
    """What the operations ask of a device, answered as an Intel GPU would."""

    def __init__(self, max_work_group_size: int = 512, is_cpu: bool = False) -> None:
        self.name = "stand-in CPU" if is_cpu else "stand-in GPU"
        self.max_work_group_size = max_work_group_size
        self.is_cpu = is_cpu
        self.is_gpu = not is_cpu
        self.max_compute_units = 2
        self.sub_group_sizes = [16, 32]


class Queue:
    is_in_order = True

    def __init__(self, device: Device) -> None:
        self.sycl_device = device


class Array:
    """Looks like a usm_ndarray to the package; its memory is `pointer`, whatever that means."""

    __sycl_usm_array_interface__ = None
    flags = SimpleNamespace(writable=True)

    def __init__(self, layout: np.ndarray, pointer: int, queue: Queue) -> None:
        self.shape = layout.shape
        self.strides = tuple(stride // layout.itemsize for stride in layout.strides)
        self.dtype = layout.dtype
        self.sycl_queue = queue
        self._pointer = pointer


class Launched(NamedTuple):
    """A launch that an operation asked for; axis 0 is the fast one."""

    module: Module
    scalars: tuple[int, ...]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]


@contextmanager
def launches_through(launcher: Any):
    """Inside, a launch is ``launcher(module, queue, scalars, global_size, local_size)(pointers, owners)``."""
    with using(launch=partial(launch_of, new=launcher)):
        yield


class Scratch:
    """Takes the place of `kvcache_dpex.runtime.launch.scratch.Scratch`, on memory of NumPy."""

    def __init__(self) -> None:
        self.lent_out: list[np.ndarray] = []

    @contextmanager
    def lent(self, size: int):
        memory = np.full(size, 0xA5, np.uint8)
        self.lent_out.append(memory)
        yield SimpleNamespace(_pointer=memory.ctypes.data)


def record(case: Case, device: Device) -> list[tuple[Launched, list[np.ndarray]]]:
    """The launches that a case asks for, each with the views that its pointers mean; nothing runs."""
    queue = Queue(device)
    views = {view.ctypes.data: view for view in case.arguments.values()}
    views[0] = np.zeros(1, np.int64)  # in the place of an argument that is left out and never read
    launched: list[tuple[Launched, list[np.ndarray]]] = []

    def recorder(module, queue, scalars, global_size, local_size):
        def run(pointers, owners=None):
            views.update((memory.ctypes.data, memory) for memory in shared.lent_out)
            fields = Launched(module, tuple(scalars), tuple(global_size), tuple(local_size))
            launched.append((fields, [views[pointer] for pointer in pointers]))

        return run

    shared = Scratch()
    with launches_through(recorder), patch.object(scratch, "of_queue", lambda queue: shared):
        case.call({name: Array(view, view.ctypes.data, queue) for name, view in case.arguments.items()})
    return launched
