"""Arguments of a kernel, laid out in memory that the calls of one launch use again.

A module takes its pointers and scalars one by one, or the address of one record that holds them all
(``IN_RECORD`` in the kernel's file), because a launch on a CPU device takes about 2 us longer for each
pointer.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import dpctl

    from ..compile.store import Module

# DPCTLKernelArgType, the same in every dpctl release since 0.17.
_ARGUMENT_TYPE = {"int64": 6, "pointer": 10}


class Arguments(NamedTuple):
    """The arguments of one submission."""

    memory: Any  # starts with the pointers, which each call fills in
    submitted: Any  # what a submission takes: pointers by value, scalars by address
    owner: Any  # keeps alive what the two refer to


class Packer:
    """Packs the arguments of a module's kernel; calls at the same time get memory of their own.

    Attributes
    ----------
    types, count
        The argument types and their number, as a submission takes them.
    pack_into
        ``pack_into(arguments.memory, 0, *pointers)`` writes the pointers of a call.
    reuse
        Takes arguments back once their submission no longer needs them.
    """

    def __init__(self, module: Module, scalars: tuple[int, ...], queue: dpctl.SyclQueue) -> None:
        kinds = ["pointer" if text.endswith("*") else text for text in module.arguments]
        self._num_pointers = kinds.count("pointer")
        self._scalars = scalars
        self._record_queue = queue if module.in_record else None
        self.pack_into = struct.Struct(f"{self._num_pointers}P").pack_into
        self._spare: list[Arguments] = []
        self.reuse = self._spare.append
        if module.in_record:
            kinds = ["int64"]
        self.types = (ctypes.c_int32 * len(kinds))(*(_ARGUMENT_TYPE[kind] for kind in kinds))
        self.count = ctypes.c_size_t(len(kinds))

    def pack(self, pointers: tuple[int, ...]) -> Arguments:
        """The arguments of one call, which owns them until it gives them back to `reuse`."""
        try:
            arguments = self._spare.pop()
        except IndexError:
            arguments = self._allocate()
        self.pack_into(arguments.memory, 0, *pointers)
        return arguments

    def _allocate(self) -> Arguments:
        if self._record_queue is None:
            return _separate(self._num_pointers, self._scalars)
        return _record(self._num_pointers, self._scalars, self._record_queue)


def _separate(num_pointers: int, scalars: tuple[int, ...]) -> Arguments:
    """Pointers and scalars one by one; SYCL copies them at submission."""
    words = _words(*scalars)
    start = ctypes.addressof(words)
    submitted = _words(*(0,) * num_pointers, *range(start, start + ctypes.sizeof(words), 8))
    return Arguments(submitted, submitted, words)


def _record(num_pointers: int, scalars: tuple[int, ...], queue: dpctl.SyclQueue) -> Arguments:
    """One record in host memory of the device, submitted by its address; the kernel reads it."""
    from dpctl.memory import MemoryUSMHost

    words = _words(*(0,) * num_pointers, *scalars)
    usm = MemoryUSMHost(ctypes.sizeof(words), queue=queue)
    ctypes.memmove(usm._pointer, words, ctypes.sizeof(words))
    address = _words(usm._pointer)
    return Arguments(
        type(words).from_address(usm._pointer), _words(ctypes.addressof(address)), (usm, address)
    )


def _words(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)
