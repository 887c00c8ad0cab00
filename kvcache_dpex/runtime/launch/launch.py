"""Builds a module for a context and submits it.

dpctl's own `submit` costs about twice the time of the launch itself, so its C function is called
with arguments laid out in memory that calls of one geometry use again.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ..compile import spirv
from ..compile.store import Module
from ..environment import devices, libraries

if TYPE_CHECKING:
    import dpctl

# DPCTLKernelArgType, the same in every dpctl release since 0.17.
_ARGUMENT_TYPE = {"int64": 6, "pointer": 10}
_NONE = ctypes.c_size_t(0)


def refuse_after_fork() -> None:
    """Raise in a child of fork: SYCL does not survive it, and the next call would hang."""
    if libraries.is_forked():
        raise RuntimeError(
            "this process was forked after dpctl was loaded, and SYCL does not survive a fork; start "
            "workers with multiprocessing.get_context('spawn')"
        )


@functools.cache
def _interface() -> ctypes.CDLL:
    devices.load_dpctl()
    library = ctypes.CDLL(str(libraries.dpctl_interface()))
    # Its ten arguments are ctypes objects, made once: to check and convert them costs microseconds a call.
    library.DPCTLQueue_SubmitNDRange.restype = ctypes.c_void_p
    for name in ("DPCTLEvent_Wait", "DPCTLEvent_Delete"):
        function = getattr(library, name)
        function.restype, function.argtypes = None, (ctypes.c_void_p,)
    return library


_built: dict[tuple[str, dpctl.SyclContext, int | None], Any] = {}


def build(module: Module, queue: dpctl.SyclQueue, subgroup_size: int | None = None) -> Any:
    """The SYCL kernel of a module; built once for a context and a required sub-group size."""
    from dpctl import program

    key = module.identity, queue.sycl_context, subgroup_size
    if key not in _built:
        binary = spirv.with_subgroup_size(module.binary, subgroup_size) if subgroup_size else module.binary
        try:
            bundle = program.create_program_from_spirv(queue, binary)
        except program.SyclProgramCompilationError as error:
            raise RuntimeError(
                f"the driver of {queue.sycl_device.name} refuses kernel {module.name}: {error}"
            ) from error
        _built[key] = bundle.get_sycl_kernel(module.name.replace("-", "_"))
    return _built[key]


def subgroup_size(device: dpctl.SyclDevice, width: int) -> int | None:
    """The sub-group size to require for work-groups that are `width` items wide; None leaves it open.

    Intel's CPU device vectorizes by as many items as the processor's registers hold, and leaves a
    narrower work-group scalar: with AVX-512, one of 8 items. Work-groups are multiples of 8 wide.
    """
    size = 16 if width % 16 == 0 else 8
    return size if device.is_cpu and size in device.sub_group_sizes else None


class Launch:
    """One kernel with its scalars and its index space: call it with pointers, as often as you like.

    Parameters
    ----------
    module
        A kernel in SPIR-V whose pointer arguments come before its scalars. One that takes a record of
        them runs on a CPU device only.
    queue
        Where to run. Whatever was submitted to it before comes first.
    scalars
        The values of the scalar arguments.
    global_size, local_size
        Items in all and in a work-group along each axis, axis 0 (the fast one) first.
    """

    def __init__(
        self,
        module: Module,
        queue: dpctl.SyclQueue,
        scalars: tuple[int, ...],
        global_size: tuple[int, ...],
        local_size: tuple[int, ...],
    ) -> None:
        if module.in_record and not queue.sycl_device.is_cpu:
            # A record is filled in again by the next call, so this one has to wait.
            raise ValueError(
                f"kernel {module.name} takes a record of its arguments, which is for CPU devices, got "
                f"{queue.sycl_device.name}"
            )
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        kinds = ["pointer" if text.endswith("*") else text for text in module.arguments]
        num_pointers = kinds.count("pointer")
        self._pack_into = struct.Struct(f"{num_pointers}P").pack_into
        self._spare: list[_Arguments] = []
        if module.in_record:
            kinds = ["int64"]
            self._new_arguments: Callable[[], _Arguments] = lambda: _record(num_pointers, scalars, queue)
        else:
            self._new_arguments = lambda: _separate(num_pointers, scalars)
        self._types = (ctypes.c_int32 * len(kinds))(*(_ARGUMENT_TYPE[kind] for kind in kinds))
        self._count = size(len(kinds))
        axes = len(global_size)
        # SYCL numbers axes the other way round: its last is the fast one.
        self._global = (size * axes)(*reversed(global_size))
        self._local = (size * axes)(*reversed(local_size))
        self._axes = size(axes)
        self._kernel = build(module, queue, subgroup_size(queue.sycl_device, local_size[0]))
        self._kernel_ref = pointer(self._kernel.addressof_ref())
        self._queue = queue
        self._queue_ref = pointer(queue.addressof_ref())
        interface = _interface()
        self._submit = interface.DPCTLQueue_SubmitNDRange
        self._wait, self._delete = interface.DPCTLEvent_Wait, interface.DPCTLEvent_Delete
        self._name = module.name
        self._orders = None if queue.is_in_order else _order_manager()
        self._waits = queue.sycl_device.is_cpu or not (queue.is_in_order or self._orders)
        # A call that waits leaves nothing to order, and an in-order queue costs less.
        self._waiting_queue = _in_order(queue) if self._waits and not queue.is_in_order else queue
        self._waiting_queue_ref = pointer(self._waiting_queue.addressof_ref())

    def __repr__(self) -> str:
        return f"<launch of {self._name}, global {self._global[::-1]}, local {self._local[::-1]}>"

    def __call__(self, pointers: tuple[int, ...], owners: Any = None) -> None:
        """Submit, after all earlier work on the queue and before all later work.

        On a GPU the host goes on at once and `owners` are kept alive until the kernel has ended; on
        the CPU device, and where dpnp itself blocks, the call returns when the kernel has ended.
        """
        order = self._orders and self._orders[self._queue]
        arguments = self._arguments(pointers)
        try:
            if self._waits:
                if order and order.num_submitted_events:
                    order.wait()
                event = self._submit_after((), self._waiting_queue_ref, arguments)
                self._wait(event)
                self._delete(event)
            else:
                earlier = order.submitted_events if order else ()
                event = self._submit_after(earlier, self._queue_ref, arguments)
                event = devices.load_dpctl().SyclEvent(capsule(event, b"SyclEventRef"))
                _keep_until_done(event, owners, order)
        except BaseException:
            # An interrupt may come while the kernel runs, and what it uses is freed after this.
            self._waiting_queue.wait()
            raise
        self._spare.append(arguments)

    def _arguments(self, pointers: tuple[int, ...]) -> _Arguments:
        """Pointers and scalars, in memory that is this call's own until it is put among the spare."""
        try:
            arguments = self._spare.pop()
        except IndexError:
            arguments = self._new_arguments()
        self._pack_into(arguments.memory, 0, *pointers)
        return arguments

    def _submit_after(self, earlier: Any, queue_ref: Any, arguments: _Arguments) -> int:
        """Submit to a queue, to start after some events; the address of the new event."""
        events, count = None, _NONE
        if earlier:
            events = struct.pack(f"{len(earlier)}P", *(event.addressof_ref() for event in earlier))
            count = ctypes.c_size_t(len(earlier))
        event = self._submit(
            self._kernel_ref,
            queue_ref,
            arguments.handed,
            self._types,
            self._count,
            self._global,
            self._local,
            self._axes,
            events,
            count,
        )
        if not event:
            raise RuntimeError(f"the SYCL runtime refused to launch {self!r}; see its message above")
        return event


class _Arguments(NamedTuple):
    """The arguments of one submission at a time."""

    memory: Any  # begins with the pointers, which each call fills in
    handed: Any  # what the submission takes: a pointer itself, and of a number where it is
    held: Any  # what the two point at


def _separate(num_pointers: int, scalars: tuple[int, ...]) -> _Arguments:
    """Pointers and scalars one by one; SYCL copies them at submission."""
    words = _words(*scalars)
    start = ctypes.addressof(words)
    handed = _words(*(0,) * num_pointers, *range(start, start + ctypes.sizeof(words), 8))
    return _Arguments(handed, handed, words)


def _record(num_pointers: int, scalars: tuple[int, ...], queue: dpctl.SyclQueue) -> _Arguments:
    """All in a record, which the kernel reads, and of that the address."""
    from dpctl.memory import MemoryUSMHost

    words = _words(*(0,) * num_pointers, *scalars)
    usm = MemoryUSMHost(ctypes.sizeof(words), queue=queue)
    ctypes.memmove(usm._pointer, words, ctypes.sizeof(words))
    address = _words(usm._pointer)
    return _Arguments(
        type(words).from_address(usm._pointer), _words(ctypes.addressof(address)), (usm, address)
    )


def _words(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def make_room(prepared: dict) -> None:
    """Forget the launches of all geometries once they are too many, as of every length of a prompt."""
    if len(prepared) >= 4096:
        prepared.clear()


def nothing(pointers: tuple[int, ...], owners: Any = None) -> None:
    """In the place of a launch where there is nothing to do."""


@functools.cache
def _in_order(queue: dpctl.SyclQueue) -> dpctl.SyclQueue:
    """A queue that keeps order, on the device and in the context of one that does not."""
    return devices.load_dpctl().SyclQueue(queue.sycl_context, queue.sycl_device, property="in_order")


@functools.cache
def _order_manager():
    """What orders dpnp's asynchronous operations on a queue, in the releases that have it."""
    from dpctl import utils

    return getattr(utils, "SequentialOrderManager", None)


def capsule(address: int, name: bytes) -> Any:
    """What dpctl's constructors take in place of an object of its C interface."""
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new_capsule(address, name, None)


_running: deque[tuple[Any, Any]] = deque()
_running_lock = threading.Lock()


def _keep_until_done(event: dpctl.SyclEvent, owners: Any, order: Any) -> None:
    """Hold `owners` until `event` is complete; let go of those that are."""
    if order is not None:
        order.add_event_pair(event, event)
    complete = devices.load_dpctl().event_status_type.complete
    with _running_lock:
        _running.append((event, owners))
        while _running and _running[0][0].execution_status == complete:
            _running.popleft()
