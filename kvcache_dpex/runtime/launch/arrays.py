"""What a launch needs to know of an array, whichever package it comes from."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np

from ..environment import devices

if TYPE_CHECKING:
    import dpctl

# NumPy's type characters; 'l' and 'q' are both 64 bits wide on Linux.
_DTYPE_NAMES = {
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
        return _DTYPE_NAMES.get(getattr(self.dtype, "char", ""), str(self.dtype).removeprefix("torch."))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


class Unreadable(TypeError):
    """What an argument must be, and what it is instead; `read` puts its name in front."""


# A reader gives a pointer and the fields of an Operand, as plain tuples: it runs on every call.
Reader = Callable[[Any], "tuple[int, tuple]"]
_readers: dict[type, Reader] = {}
_output_readers: dict[type, Reader] = {}


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
    except _ReadOnly:
        raise ValueError(f"`{name}` must be writable, got a read-only array") from None


class _ReadOnly(Exception):
    """A dpnp array or usm_ndarray that must not be written."""


def is_tensor(array: Any) -> bool:
    """Whether this is a torch tensor; never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _find_readers(array: Any) -> tuple[Reader, Reader]:
    """Readers for inputs and outputs of this type, found once."""
    kind = type(array)
    if is_tensor(array):
        from . import tensors

        reader = tensors.reader_for(kind)
        readers: tuple[Reader, Reader] = reader, reader
    elif hasattr(array, "__sycl_usm_array_interface__"):
        usm_of = kind.get_array if hasattr(array, "get_array") else lambda usm: usm
        place = _state_place(usm_of(array))
        readers = _usm_reader(usm_of, place, _approve), _usm_reader(usm_of, place, _require_writable)
    else:
        raise Unreadable(
            f"must be a dpnp array, a usm_ndarray or a torch.Tensor, got "
            f"{kind.__module__}.{kind.__qualname__}; dpnp.asarray makes an array of the device"
        )
    _readers[kind], _output_readers[kind] = readers
    return readers


def _usm_reader(usm_of: Callable[[Any], Any], place: int | None, check: Callable[[Any], None]) -> Reader:
    """A reader for arrays whose usm_ndarray `usm_of` gives and `check` approves; see `_state_place`."""

    def ask(array: Any) -> tuple[int, tuple]:
        usm = usm_of(array)
        check(usm)
        return usm._pointer, (usm.shape, usm.strides, usm.dtype, usm.sycl_queue)

    if place is None:
        return ask
    # Element `id >> 3` of a pointer to `place` lies at `id + place`; this costs half of `from_address`.
    words = ctypes.cast(place, ctypes.POINTER(ctypes.c_int64))
    dtypes: dict[int, Any] = {}  # of the states that `check` has approved

    def read(array: Any) -> tuple[int, tuple]:
        usm = usm_of(array)
        state = words[id(usm) >> 3]
        dtype = dtypes.get(state)
        if dtype is None:
            check(usm)
            dtype = dtypes[state] = usm.dtype
        return usm._pointer, (usm.shape, usm.strides, dtype, usm.sycl_queue)

    return read


def _approve(usm: Any) -> None:
    """Any array may be read."""


def _require_writable(usm: Any) -> None:
    if not usm.flags.writable:
        raise _ReadOnly


def _state_place(usm: Any) -> int | None:
    """Where in a usm_ndarray, such as this, its state lies: NumPy's number of its dtype, then its flags.

    Its own `dtype` parses a string every time, and `flags` makes an object: a seventh of a small write. The
    place is found by looking into some arrays, so that nothing is assumed of another release; None if
    there is no such place, and in arrays of other packages.
    """
    if type(usm).__name__ != "usm_ndarray":
        return None
    number_at, state_at = ctypes.c_int.from_address, ctypes.c_int64.from_address
    empty = tensor_module().empty
    samples = [empty(1, dtype=character, sycl_queue=usm.sycl_queue) for character in "bBhHiIlLff"]
    if type(usm) is not type(samples[0]):
        return None
    *_, writable, read_only = samples
    read_only.flags.writable = False
    places = [
        place
        for place in range(object.__basicsize__, type(usm).__basicsize__, ctypes.sizeof(ctypes.c_int64))
        if all(number_at(id(sample) + place).value == sample.dtype.num for sample in samples)
        and state_at(id(writable) + place).value != state_at(id(read_only) + place).value
    ]
    return places[0] if len(places) == 1 else None


# dtypes that no array package here has: their bits travel as unsigned integers.
_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def storage_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype that holds a dtype's values or bits; raise TypeError for any other."""
    name = str(dtype).removeprefix("torch.") if "torch" in str(dtype) else dtype
    try:
        found = np.dtype(_BITS.get(name, name) if isinstance(name, str) else name)
    except TypeError as error:
        raise TypeError(f"`dtype` must be a dtype or its name, got {dtype!r}") from error
    if found.itemsize not in (1, 2, 4, 8) or found.char not in _DTYPE_NAMES:
        raise TypeError(f"`dtype` must be numeric, of 1, 2, 4 or 8 bytes, got {dtype!r}")
    return found


@functools.cache
def tensor_module():
    """The module of usm_ndarray: dpnp.tensor, or dpctl.tensor in older releases."""
    devices.load_dpctl()
    try:
        import dpnp.tensor as tensor
    except ImportError as error:
        try:
            import dpctl.tensor as tensor
        except ImportError:
            raise _needs_dpnp(error) from error
    return tensor


def zeros(shape: tuple[int, ...], dtype: np.dtype, queue: dpctl.SyclQueue, usm_type: str) -> Any:
    """A dpnp array of zeros."""
    return as_dpnp(tensor_module().zeros(shape, dtype=dtype, sycl_queue=queue, usm_type=usm_type))


def as_dpnp(usm: Any) -> Any:
    """The dpnp array of a usm_ndarray."""
    try:
        from dpnp.dpnp_array import dpnp_array
    except ImportError as error:
        raise _needs_dpnp(error) from error
    return dpnp_array._create_from_usm_ndarray(usm)


def _needs_dpnp(error: ImportError) -> ImportError:
    return ImportError(f"arrays of kvcache_dpex are dpnp arrays ({error}): pip install dpnp")


def empty_like(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An uninitialised array of the same package, on the same queue."""
    if is_tensor(array):
        from . import tensors

        return tensors.empty_like(array, shape, dtype)
    usm = array.get_array() if hasattr(array, "get_array") else array
    result = tensor_module().empty(
        shape, dtype=storage_dtype(dtype), sycl_queue=usm.sycl_queue, usm_type=usm.usm_type
    )
    return result if usm is array else type(array)._create_from_usm_ndarray(result)


def to_numpy(array: Any) -> np.ndarray:
    """A copy on the host, after all work that writes the array."""
    if is_tensor(array):
        from . import tensors

        return tensors.to_numpy(array)
    usm = array.get_array() if hasattr(array, "get_array") else array
    return tensor_module().asnumpy(usm)
