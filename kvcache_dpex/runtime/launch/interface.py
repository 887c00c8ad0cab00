"""The C functions of dpctl that a launch calls.

dpctl's own `submit` costs about twice the time of the launch itself, so its C interface is called through
ctypes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..environment import devices, libraries

NO_EVENTS = ctypes.c_size_t(0)
"""The number of events that a submission depends on; the queue orders it."""


class Event(ctypes.c_void_p):
    """A reference to an event, deleted with this object; false where the runtime returned none.

    An interrupt may come as soon as the C function has returned, before its result has a name, so the
    result has to be an object that owns the reference.
    """


class Interface:
    """The functions, with their types."""

    def __init__(self) -> None:
        devices.load_dpctl()
        library = ctypes.CDLL(str(libraries.dpctl_interface()))
        # No argtypes: all arguments are ctypes objects already, and checking them costs time in each call.
        self.submit = library.DPCTLQueue_SubmitNDRange
        self.submit.restype = Event
        self.barrier = library.DPCTLQueue_SubmitBarrier
        self.barrier.restype = Event
        self.wait = library.DPCTLEvent_Wait
        self.wait.restype = None
        delete = library.DPCTLEvent_Delete
        delete.restype = None
        # A C function: an interrupt during a destructor written in Python would be swallowed.
        Event.__del__ = _method(delete)  # type: ignore[attr-defined]


interface = functools.cache(Interface)


def _method(function: Any) -> Any:
    new = ctypes.pythonapi.PyInstanceMethod_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.py_object,)
    return new(function)


def capsule(address: Any, name: bytes) -> Any:
    """A capsule from which dpctl's constructors copy an object of its C interface."""
    return _new_capsule()(address, name, None)


@functools.cache
def _new_capsule() -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new
