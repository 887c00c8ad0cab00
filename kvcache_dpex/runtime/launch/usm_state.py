"""dtype and flags of a usm_ndarray, read from its C struct.

Its own `dtype` parses a string every time and `flags` makes an object: about 2 us of a small write of 13 us.
Where both lie in the struct is found by looking into sample arrays, so nothing is assumed of a release of
dpctl or dpnp; where no such place is found, and with ``KVCACHE_DPEX_USM_STATE=0``, the array is asked.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Callable

from .readers import Reader


def reader(
    usm: Any, usm_of: Callable[[Any], Any], check: Callable[[Any], None], empty: Callable[..., Any]
) -> Reader | None:
    """A reader for arrays whose usm_ndarray, such as `usm`, `usm_of` gives and `check` approves.

    `empty` is the function of the array's package that makes the sample arrays. None where the array has
    to be asked.
    """
    place = None if os.environ.get("KVCACHE_DPEX_USM_STATE") == "0" else _place(usm, empty)
    if place is None:
        return None
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


def _place(usm: Any, empty: Callable[..., Any]) -> int | None:
    """The offset of NumPy's number of the dtype, which the flags follow."""
    number_at, state_at = ctypes.c_int.from_address, ctypes.c_int64.from_address
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
