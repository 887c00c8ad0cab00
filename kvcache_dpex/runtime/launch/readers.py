"""What a launch needs to know of an array, whichever package it comes from.

Each package of arrays registers how its arrays are read: `arrays` that of dpnp, `tensors` that of torch.
Neither knows of the other.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import dpctl

# NumPy's type characters; 'l' and 'q' are both 64 bits wide on Linux.
DTYPE_NAMES = {
    "?": "bool",
    "b": "int8",
    "B": "uint8",
    "h": "int16",
    "H": "uint16",
    "e": "float16",
    "i": "int32",
    "I": "uint32",
    "f": "float32",
    "l": "int64",
    "L": "uint64",
    "q": "int64",
    "Q": "uint64",
    "d": "float64",
    "F": "complex64",
    "D": "complex128",
}


class Operand(NamedTuple):
    """Shape and strides (in elements), dtype and place of an array; equal for arrays of one kind."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    queue: dpctl.SyclQueue

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES.get(getattr(self.dtype, "char", ""), str(self.dtype).removeprefix("torch."))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


class Unreadable(TypeError):
    """Why an argument cannot be read: an error without the argument's name, which `read` puts in front."""


class ReadOnly(Exception):
    """An array that must not be written."""


# A reader gives a pointer and the fields of an Operand, as plain tuples: it runs on every call.
Reader = Callable[[Any], "tuple[int, tuple]"]
_readers: dict[type, Reader] = {}
_output_readers: dict[type, Reader] = {}


class Package(NamedTuple):
    """What a package of arrays registers."""

    readers: Callable[[Any], tuple[Reader, Reader]]
    """Readers of inputs and of outputs, for arrays of this array's type."""
    empty_like: Callable[[Any, tuple[int, ...], Any], Any]
    """An uninitialised array of a shape and dtype, where this array is."""
    to_numpy: Callable[[Any], np.ndarray]
    """A copy on the host, after all work that writes the array."""
    of_host: Callable[[Any, np.ndarray], Any]
    """An array of the same values that kernels beside this array can read; waits for nothing."""


_packages: dict[str, Package] = {}


def register(name: str, package: Package) -> None:
    """Make the arrays of a package known."""
    _packages[name] = package


def package_of(array: Any) -> Package:
    """What the package of an array has registered; its module is loaded with the first of its arrays."""
    name = "tensors" if is_tensor(array) else "arrays"
    if name not in _packages:
        importlib.import_module(f"{__package__}.{name}")
    return _packages[name]


def is_tensor(array: Any) -> bool:
    """Whether this is a torch tensor; never imports torch."""
    # While another thread imports torch, the module is there but its tensors are not.
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_type is not None and isinstance(array, tensor_type)


def read(array: Any, name: str) -> tuple[int, tuple]:
    """Pointer and `Operand` fields of an array; raise TypeError, naming the argument, for others."""
    try:
        return (_readers.get(type(array)) or _find_readers(array)[0])(array)
    except Unreadable as reason:
        raise TypeError(f"`{name}` {reason}") from None


def read_output(array: Any, name: str) -> tuple[int, tuple]:
    """As `read`; raise ValueError for a read-only array."""
    try:
        return (_output_readers.get(type(array)) or _find_readers(array)[1])(array)
    except Unreadable as reason:
        raise TypeError(f"`{name}` {reason}") from None
    except ReadOnly:
        raise ValueError(f"`{name}` must be writable, got a read-only array") from None


def _find_readers(array: Any) -> tuple[Reader, Reader]:
    """Readers for inputs and outputs of this type, found once."""
    readers = package_of(array).readers(array)
    _readers[type(array)], _output_readers[type(array)] = readers
    return readers


def name_of(array: Any) -> str:
    """What an argument is, for an error: its type, or that it is a class itself."""
    kind = array if isinstance(array, type) else type(array)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"the class {name}" if isinstance(array, type) else name
