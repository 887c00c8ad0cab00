"""Memory as a kernel sees it when it runs as plain Python: pointers and views, every access checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import parameters

# NumPy has no such types: the bits of their elements, as arrays hold them.
STORED = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class Pointer:
    """Memory as a kernel sees it: element 0 is element `start` of a one-dimensional array.

    >>> pointer = Pointer(np.arange(10), start=4)
    >>> int(pointer[3]), int(pointer[-4])
    (7, 0)
    """

    def __init__(self, memory: np.ndarray, start: int = 0) -> None:
        if memory.ndim != 1 or not memory.flags.c_contiguous:
            raise ValueError(
                f"`memory` must be one-dimensional and contiguous, got shape {list(memory.shape)} and "
                f"strides {list(memory.strides)}; for a view, pass the array that it looks at and `start`"
            )
        self.memory = memory
        self.start = start

    def __repr__(self) -> str:
        return f"<pointer to element {self.start} of {self.memory.size} {self.memory.dtype}>"

    def __getitem__(self, index: int) -> Any:
        return self.memory[self._place(index)]

    def __setitem__(self, index: int, value: Any) -> None:
        self.memory[self._place(index)] = value

    def _place(self, index: int) -> int:
        place = self.start + int(index)
        if not 0 <= place < self.memory.size:
            raise IndexError(f"index {index} of {self!r} lies outside of its memory")
        return place


class View:
    """A pointer with a stride for each axis, as `kernels.views` reads and writes it; every access is checked.

    >>> view = View(parameters.parse("float32*2[row, pair=1]"), Pointer(np.arange(8, dtype="f4")), [2])
    >>> [float(x) for x in view.load((1, 1))]
    [6.0, 7.0]
    """

    def __init__(self, parameter: parameters.Parameter, pointer: Pointer, strides: Sequence[Any]) -> None:
        self.element, self.width, self.contiguous = parameter.element, parameter.width, parameter.contiguous
        self._pointer = pointer
        self._axes = parameter.axes
        self._strides = (*strides, 1) if parameter.contiguous else tuple(strides)

    def load(self, index: tuple) -> Any:
        places = self._places(index)
        return tuple(map(self._load, places)) if isinstance(index[-1], tuple) else self._load(places[0])

    def store(self, value: Any, index: tuple) -> None:
        many = isinstance(index[-1], tuple)
        places = self._places(index)
        for place, each in zip(places, _exactly(len(places), value) if many else (value,)):
            self._store(place, each)

    def store_zero(self, index: tuple) -> None:
        zero = np.float32(0) if self.element == "bfloat16" else 0
        for place in self._places(index):
            self._store(place, zero if self.width == 1 else (zero,) * self.width)

    def row_from(self, index: tuple) -> View:
        (place,) = self._places(index)
        parameter = parameters.Parameter("view", self.element, self.width, self._axes[-1:], self.contiguous)
        moved = Pointer(self._pointer.memory, self._pointer.start + place * self.width)
        return View(parameter, moved, [] if self.contiguous else self._strides[-1:])

    def _places(self, index: tuple) -> list:
        """The elements that an index means: one, or one for each last index."""
        if len(index) != len(self._strides):
            raise IndexError(f"a view of axes {list(self._axes)} takes as many indices, got {len(index)}")
        *outer, last = index
        start = sum(int(number) * int(stride) for number, stride in zip(outer, self._strides))
        steps = last if isinstance(last, tuple) else (last,)
        return [start + int(step) * int(self._strides[-1]) for step in steps]

    def _load(self, place: int) -> Any:
        if self.width == 1:
            return self._value(self._pointer[place])
        return tuple(self._value(self._pointer[at]) for at in self._neighbours(place))

    def _store(self, place: int, value: Any) -> None:
        if self.width == 1:
            self._pointer[place] = self._bits(value)
        else:
            for at, each in zip(self._neighbours(place), _exactly(self.width, value)):
                self._pointer[at] = self._bits(each)

    def _neighbours(self, place: int) -> range:
        """The scalars of a vector, whose address must be a multiple of its size, up to 16 bytes."""
        first = place * self.width
        memory = self._pointer.memory
        address = memory.ctypes.data + (self._pointer.start + first) * memory.itemsize
        if address % min(self.width * memory.itemsize, 16):
            raise ValueError(
                f"vector {place} of {self.width} at {self._pointer!r} is not aligned to its size"
            )
        return range(first, first + self.width)

    def _value(self, stored: Any) -> Any:
        if self.element == "bfloat16":
            return (stored.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.float32(stored) if self.element == "float16" else stored

    def _bits(self, value: Any) -> Any:
        if self.element != "bfloat16":
            return value
        bits = int(np.float32(value).view(np.uint32))
        bits += 0x7FFF + (bits >> 16 & 1) if bits & 0x7FFFFFFF <= 0x7F800000 else 0
        return np.uint16(bits >> 16 & 0xFFFF).view(np.int16)


def _exactly(count: int, values: tuple) -> tuple:
    if len(values) != count:
        raise ValueError(f"{count} values are stored at once, got {len(values)}")
    return values
