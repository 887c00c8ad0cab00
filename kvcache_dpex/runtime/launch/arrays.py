"""dpnp's arrays and usm_ndarrays as operands; dtypes, allocation, copies to the host."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from ..environment import devices
from . import usm_state
from .readers import (
    DTYPE_NAMES,
    Operand,
    Package,
    Reader,
    ReadOnly,
    Unreadable,
    is_tensor,
    name_of,
    package_of,
    read,
    read_output,
    register,
)

if TYPE_CHECKING:
    import dpctl

__all__ = [
    "Operand",
    "as_dpnp",
    "empty_like",
    "is_tensor",
    "of_host",
    "read",
    "read_output",
    "storage_dtype",
    "swapped",
    "tensor_module",
    "to_numpy",
    "viewed",
    "zeros",
]

_NEEDED = ("_pointer", "shape", "strides", "dtype", "flags", "sycl_queue")


def _find_readers(array: Any) -> tuple[Reader, Reader]:
    """Readers for arrays of this type, which is dpnp's, a usm_ndarray or stands in for one."""
    kind = type(array)
    usm = _usm_of(array)
    if isinstance(array, type) or not all(hasattr(usm, name) for name in _NEEDED):
        raise Unreadable(
            f"must be a dpnp array, a usm_ndarray or a torch.Tensor, got {name_of(array)}; dpnp.asarray "
            "makes an array of the device"
        )
    usm_of = kind.get_array if usm is not array else lambda usm: usm

    def reader(check: Callable[[Any], None]) -> Reader:
        found = None
        if type(usm).__name__ == "usm_ndarray":
            found = usm_state.reader(usm, usm_of, check, tensor_module().empty)
        return found or _asking_reader(usm_of, check)

    return reader(_approve), reader(_require_writable)


def _usm_of(array: Any) -> Any:
    """The usm_ndarray of a dpnp array; anything else is returned as it is."""
    return array.get_array() if hasattr(type(array), "get_array") else array


def _asking_reader(usm_of: Callable[[Any], Any], check: Callable[[Any], None]) -> Reader:
    """A reader for arrays whose usm_ndarray `usm_of` gives and `check` approves."""

    def read(array: Any) -> tuple[int, tuple]:
        usm = usm_of(array)
        check(usm)
        return usm._pointer, (usm.shape, usm.strides, usm.dtype, usm.sycl_queue)

    return read


def _approve(usm: Any) -> None:
    """Any array may be read."""


def _require_writable(usm: Any) -> None:
    if not usm.flags.writable:
        raise ReadOnly


# dtypes that no array package here has: their bits travel as unsigned integers.
_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def storage_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype that holds a dtype's values or bits; raise TypeError for any other."""
    name = str(dtype).removeprefix("torch.") if "torch" in str(type(dtype)) else dtype
    if not isinstance(name, (str, type, np.dtype)):
        raise TypeError(f"`dtype` must be a dtype or its name, got {dtype!r}")
    try:
        found = np.dtype(_BITS.get(name, name) if isinstance(name, str) else name)
    except TypeError as error:
        raise TypeError(f"`dtype` must be a dtype or its name, got {dtype!r}") from error
    if found.itemsize not in (1, 2, 4, 8) or found.char not in DTYPE_NAMES:
        raise TypeError(f"`dtype` must be numeric, of 1, 2, 4 or 8 bytes, got {dtype!r}")
    if not found.isnative:
        raise TypeError(
            f"`dtype` must be in the byte order of the device, got {dtype!r}; use "
            f"{found.newbyteorder('=').name!r}"
        )
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


def viewed(memory: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int, dtype: np.dtype) -> Any:
    """A dpnp array in the memory of another, from element `first` on; strides count elements."""
    if 0 in shape:
        return zeros(shape, dtype, memory.sycl_queue, memory.usm_type)
    place = {"buffer": memory.get_array(), "strides": strides, "offset": first}
    return as_dpnp(tensor_module().usm_ndarray(shape, dtype=dtype, **place))


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
    """An uninitialised array of the same package, on the same queue and of the same USM type."""
    return package_of(array).empty_like(array, shape, dtype)


def to_numpy(array: Any) -> np.ndarray:
    """A copy on the host, after all work that writes the array."""
    return package_of(array).to_numpy(array)


def swapped(array: Any, first: int, second: int) -> Any:
    """A view of an array with two axes exchanged."""
    if hasattr(array, "swapaxes"):
        return array.swapaxes(first, second)
    return tensor_module().swapaxes(array, first, second)


def of_host(array: Any, values: np.ndarray) -> Any:
    """The values of a NumPy array, where kernels on the queue of an array can read them."""
    return package_of(array).of_host(array, values)


def _empty_like(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    usm = _usm_of(array)
    result = tensor_module().empty(
        shape, dtype=storage_dtype(dtype), sycl_queue=usm.sycl_queue, usm_type=usm.usm_type
    )
    return result if usm is array else type(array)._create_from_usm_ndarray(result)


def _to_numpy(array: Any) -> np.ndarray:
    return tensor_module().asnumpy(_usm_of(array))


def _of_host(array: Any, values: np.ndarray) -> Any:
    queue = _usm_of(array).sycl_queue
    # Memory of the host needs no copy that would wait for the queue.
    result = tensor_module().empty(values.shape, dtype=values.dtype, sycl_queue=queue, usm_type="host")
    np.frombuffer(result.usm_data, values.dtype)[: values.size] = values.ravel()
    return result


register("arrays", Package(_find_readers, _empty_like, _to_numpy, _of_host))
