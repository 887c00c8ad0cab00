"""Builds a module for a context and launches its kernel."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Callable
from weakref import WeakValueDictionary

from ..compile import spirv
from ..compile.store import Module
from ..environment import libraries
from .arguments import Arguments, Packer
from .interface import NO_EVENTS, Event, interface
from .order import Order, order_for

if TYPE_CHECKING:
    import dpctl


def refuse_after_fork() -> None:
    """Raise in a child of fork: SYCL does not survive it, and the next call would hang."""
    if libraries.is_forked():
        raise RuntimeError(
            "this process was forked after dpctl was loaded, and SYCL does not survive a fork; start "
            "workers with multiprocessing.get_context('spawn')"
        )


class Kernel:
    """A kernel that is built for a context."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.reference = ctypes.c_void_p(kernel.addressof_ref())


# A kernel and the context in its key go with the last launch that uses them.
_built: MutableMapping[tuple[str, dpctl.SyclContext, int | None], Kernel] = WeakValueDictionary()


def build(module: Module, queue: dpctl.SyclQueue, subgroup_size: int | None = None) -> Kernel:
    """The kernel of a module for the queue's context, with a sub-group size if the module must have one.

    It is built unless a launch uses it already.
    """
    from dpctl import program

    key = module.identity, queue.sycl_context, subgroup_size
    built = _built.get(key)
    if built is None:
        binary = spirv.with_subgroup_size(module.binary, subgroup_size) if subgroup_size else module.binary
        try:
            bundle = program.create_program_from_spirv(queue, binary)
        except program.SyclProgramCompilationError as error:
            raise RuntimeError(
                f"the driver of {queue.sycl_device.name} refuses kernel {module.name}: {error}"
            ) from error
        built = _built[key] = Kernel(bundle.get_sycl_kernel(module.name.replace("-", "_")))
    return built


def subgroup_size(device: dpctl.SyclDevice, width: int) -> int | None:
    """The sub-group size to require for work-groups that are `width` items wide; None leaves it open.

    Intel's CPU device vectorizes by as many items as the processor's registers hold, and leaves a
    narrower work-group scalar: with AVX-512, one of 8 items. Work-groups are multiples of 8 wide.
    """
    size = 16 if width % 16 == 0 else 8
    return size if device.is_cpu and size in device.sub_group_sizes else None


class Launch:
    """One kernel with its scalars and its index space; call it with pointers, as often as you like.

    Parameters
    ----------
    module
        A kernel in SPIR-V whose pointer arguments come before its scalars. One that takes a record of
        them needs an order that blocks.
    queue
        Where to run. Whatever was submitted to it before comes first.
    scalars
        The values of the scalar arguments.
    global_size, local_size
        Items in all and in a work-group along each axis, axis 0 (the fast one) first.
    order
        What orders the kernel among other work on the queue; by default what suits the device.
    """

    def __init__(
        self,
        module: Module,
        queue: dpctl.SyclQueue,
        scalars: tuple[int, ...],
        global_size: tuple[int, ...],
        local_size: tuple[int, ...],
        order: Callable[[dpctl.SyclQueue], Order] = order_for,
    ) -> None:
        self.order = order(queue)
        if module.in_record and not self.order.blocks:
            # The next call fills the record in again, which the kernel of this call may still read.
            raise ValueError(
                f"kernel {module.name} takes a record of its arguments, which is for CPU devices, got "
                f"{queue.sycl_device.name}"
            )
        self._packer = Packer(module, scalars, queue)
        self._types, self._count = self._packer.types, self._packer.count
        size = ctypes.c_size_t
        axes = len(global_size)
        # SYCL numbers axes the other way round: its last is the fast one.
        self._global = (size * axes)(*reversed(global_size))
        self._local = (size * axes)(*reversed(local_size))
        self._axes = size(axes)
        self.kernel = build(module, queue, subgroup_size(queue.sycl_device, local_size[0]))
        self._kernel_ref = self.kernel.reference
        self.queue = queue
        self._queue_ref = ctypes.c_void_p(self.order.queue.addressof_ref())
        self._submit = interface().submit
        self._name = module.name

    def __repr__(self) -> str:
        return f"<launch of {self._name}, global {self._global[::-1]}, local {self._local[::-1]}>"

    def __call__(self, pointers: tuple[int, ...], owners: Any = None) -> None:
        """Submit the kernel, after all earlier work on the queue and before all later work.

        On a GPU the host goes on at once and `owners`, a tuple of arrays, are kept alive until the kernel
        has ended; on a CPU device, and where dpnp itself blocks, the call returns when it has ended.
        """
        arguments = self._packer.pack(pointers)
        order = self.order
        try:
            order.before()
            order.after(self.submit(arguments), owners)
        except BaseException:
            # The kernel of an interrupted call may run, and its operands may be freed after the call.
            order.queue.wait()
            raise
        self._packer.reuse(arguments)

    def submit(self, arguments: Arguments) -> Event:
        """Submit the kernel, in whatever order the queue gives it."""
        event = self._submit(
            self._kernel_ref,
            self._queue_ref,
            arguments.submitted,
            self._types,
            self._count,
            self._global,
            self._local,
            self._axes,
            None,
            NO_EVENTS,
        )
        if not event:
            raise RuntimeError(f"the SYCL runtime refused to launch {self!r}; see its message above")
        return event


class LaunchCache(dict):
    """Launches by geometry: the newest of each queue, and of the newest queues only.

    A launch holds its queue, and with it a context and the kernels that were built for that. SYCL does not
    tell when a program is done with a queue, so old queues have to make room for new ones.
    """

    LAUNCHES = 4096  # of one queue; every prompt length may be a geometry of its own
    QUEUES = 16

    def __init__(self) -> None:
        super().__init__()
        self._queues: OrderedDict[dpctl.SyclQueue, OrderedDict[tuple, None]] = OrderedDict()

    def add(self, geometry: tuple, queue: dpctl.SyclQueue, launch: Any) -> None:
        """Keep a launch for calls of this geometry, which are on this queue."""
        # `popitem` is one step, so no lock is needed, which a signal handler could find taken.
        if queue not in self._queues and len(self._queues) >= self.QUEUES:
            for forgotten in self._queues.popitem(last=False)[1]:
                self.pop(forgotten, None)
        geometries = self._queues.setdefault(queue, OrderedDict())
        if len(geometries) >= self.LAUNCHES:
            self.pop(geometries.popitem(last=False)[0], None)
        geometries[geometry] = None
        self[geometry] = launch


def nothing(pointers: tuple[int, ...], owners: Any = None) -> None:
    """A launch that does nothing, for empty input."""
