"""The order of a kernel among all other work on its queue, and how long its operands are kept alive.

A launch calls ``before()``, submits its kernel to the queue, and calls ``after(event, owners)``. Both
policies order it after all work that was submitted to the queue earlier and before all that is submitted
later, whoever submits it: dpnp, ``queue.memcpy_async``, numba-dpex, other libraries.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, Union
from weakref import WeakValueDictionary

from ..environment import devices
from .interface import Event, capsule, interface
from .readers import is_tensor

if TYPE_CHECKING:
    import dpctl


class Blocking:
    """The host waits for the queue before the kernel and for the kernel after it.

    On a CPU device that is the fastest way to order them, and the caller keeps the operands alive. With
    nothing left to order, an in-order queue of the same context takes the kernel: it costs less.
    """

    blocks = True

    def __init__(self, queue: dpctl.SyclQueue) -> None:
        self._wait = interface().wait
        if queue.is_in_order:
            self.queue, self.before = queue, _nothing
        else:
            self._companion = _companion(queue)
            self.queue, self.before = self._companion.queue, queue.wait

    def after(self, event: Event, owners: Any) -> None:
        self._wait(event)


def _nothing() -> None:
    """No wait: an in-order queue runs its work in the order of submission."""


class _Companion:
    """An in-order queue; a class of our own, since dpctl's has no weak references."""

    def __init__(self, queue: dpctl.SyclQueue) -> None:
        self.queue = devices.load_dpctl().SyclQueue(
            queue.sycl_context, queue.sycl_device, property="in_order"
        )


_companions: WeakValueDictionary[tuple[dpctl.SyclContext, dpctl.SyclDevice], _Companion]
_companions = WeakValueDictionary()


def _companion(queue: dpctl.SyclQueue) -> _Companion:
    """The in-order queue for a device in a context; it goes with the last launch that uses it."""
    key = queue.sycl_context, queue.sycl_device
    found = _companions.get(key)
    if found is None:
        found = _companions.setdefault(key, _Companion(queue))
    return found


class Asynchronous:
    """The host goes on at once; operands are released when the kernel has ended.

    An out-of-order queue gets a barrier before the kernel and one after it.
    """

    blocks = False

    def __init__(self, queue: dpctl.SyclQueue) -> None:
        self.queue = queue
        self._queue_ref = ctypes.c_void_p(queue.addressof_ref())
        self._barrier = None if queue.is_in_order else interface().barrier
        self._event_type = devices.load_dpctl().SyclEvent
        self._managers = order_managers()

    def before(self) -> None:
        if self._barrier:
            self._barrier(self._queue_ref)

    def after(self, event: Event, owners: Any) -> None:
        if self._barrier:
            self._barrier(self._queue_ref)
        if owners is None or _belong_to_torch(owners):
            return
        kernel = self._event_type(capsule(event, b"SyclEventRef"))  # a copy of the reference
        # dpctl's own way to keep arguments alive: a host task that releases them after the kernel.
        released = self.queue._submit_keep_args_alive(owners, [kernel])
        if self._managers:
            self._managers[self.queue].add_event_pair(released, kernel)


def _belong_to_torch(owners: Any) -> bool:
    """Whether the operands are tensors on an XPU: torch gives their memory only to later work of the stream.

    A host task on torch's stream would keep its later kernels waiting for Python.
    """
    return bool(owners) and is_tensor(owners[0]) and owners[0].is_xpu


Order = Union[Blocking, Asynchronous]


def order_for(queue: dpctl.SyclQueue) -> Order:
    """Asynchronous on a GPU, blocking on a CPU device and where dpnp's own operations block."""
    if queue.sycl_device.is_cpu or not (queue.is_in_order or order_managers()):
        return Blocking(queue)
    return Asynchronous(queue)


@functools.cache
def order_managers() -> Any:
    """What orders dpnp's asynchronous operations on each queue; None in releases whose operations block."""
    from dpctl import utils

    return getattr(utils, "SequentialOrderManager", None)
