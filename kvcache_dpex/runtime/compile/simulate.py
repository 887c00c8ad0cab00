"""Runs a kernel as plain Python over NumPy memory: no device, no compiler, and a debugger works.

Every access is checked: an index outside of the memory raises, where a device would read or destroy
whatever lies there.
"""

# Not `from __future__ import annotations`: a kernel's annotations, as in the example, must stay as they are.
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import numpy as np

from ...kernels import intrinsics
from . import parameters, source

# NumPy has no such types: the bits of their elements, as arrays hold them.
_STORED = {"bfloat16": "int16", "float8_e4m3fn": "uint8"}
_PATIENCE = 30  # seconds that an item waits at a barrier that another item never reaches


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

    def row_from(self, index: tuple) -> "View":
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


class Item:
    """Where one item stands: in the whole index space, and in its work-group."""

    def __init__(self, place: Sequence[int], local_size: Sequence[int]) -> None:
        self._place = place
        self._local_size = local_size

    def get_id(self, axis: int) -> Any:
        return np.int64(self._place[axis])

    get_global_id = get_id

    def get_local_id(self, axis: int) -> Any:
        return np.int64(self._place[axis] % self._local_size[axis])

    def get_local_range(self, axis: int) -> Any:
        return np.int64(self._local_size[axis])

    def get_group(self) -> "Item":
        return self

    def get_group_id(self, axis: int) -> Any:
        return np.int64(self._place[axis] // self._local_size[axis])


class Group:
    """What the items of one work-group share, each of them in a thread."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, action=self._all_are_here, timeout=_PATIENCE)
        self._memory: dict = {}
        self._stage = 0
        self._brought: dict = {}
        self._exchanged: list = []

    def barrier(self) -> None:
        self._barrier.wait()

    def abort(self) -> None:
        self._barrier.abort()

    def exchange(self, value: Any) -> list:
        """What every item brings, in the order of the items."""
        self._brought[intrinsics.current.number] = value
        self._barrier.wait()
        return self._exchanged

    def max(self, bits: Any) -> Any:
        return max(self.exchange(bits))

    def put(self, index: int, bits: Any) -> None:
        self._memory[int(index)] = bits, self._stage, threading.get_ident()

    def get(self, index: int) -> Any:
        if int(index) not in self._memory:
            raise IndexError(f"word {index} of the work-group is read, but nothing was put there")
        bits, stage, writer = self._memory[int(index)]
        if stage == self._stage and writer != threading.get_ident():
            raise RuntimeError(f"word {index} of the work-group is read without a barrier after it was put")
        return bits

    def _all_are_here(self) -> None:
        """Run once at each barrier, before anyone goes on."""
        self._stage += 1
        self._exchanged = [value for _, value in sorted(self._brought.items())]
        self._brought = {}


def simulate(
    kernel: Callable,
    global_size: Sequence[int],
    pointers: Sequence[Any],
    scalars: Sequence[Any] = (),
    local_size: Optional[Sequence[int]] = None,
    *,
    types: Optional[Mapping[str, str]] = None,
) -> None:
    """Run `kernel` for every item of an index space, one work-group after the other.

    The items of a group run one after the other too, unless they wait for one another or share memory:
    then each runs in a thread.

    Parameters
    ----------
    kernel
        A kernel as the `kernels` folder describes them.
    global_size
        Items along each axis, axis 0 (the fast one) first.
    pointers
        A contiguous NumPy array, or a `Pointer`, for each view and each pointer.
    scalars
        The strides of each view, in its elements, and each number, in the order of the kernel's arguments.
    local_size
        Items of a work-group along each axis; by default one group holds them all.
    types
        Values for the kernel's type variables, where the arrays' dtypes do not say them.

    Examples
    --------
    >>> def double(item: "item[1]", data: "word*", size: "int64"):
    ...     if item.get_id(0) < size:
    ...         data[item.get_id(0)] = 2 * data[item.get_id(0)]
    >>> data = np.arange(4)
    >>> simulate(double, [16], [data], [3])
    >>> data
    array([0, 2, 4, 3])
    """
    space, *annotations = kernel.__annotations__.values()
    texts = [parameters.bind(text, {"step": "any", **(types or {})}) for text in annotations]
    flat = parameters.flattened(texts)
    if len(pointers) + len(scalars) != len(flat):
        names = ", ".join(list(kernel.__annotations__)[1:])
        raise TypeError(
            f"{kernel.__name__} takes {len(flat)} pointers and numbers for its arguments ({names}), "
            f"got {len(pointers) + len(scalars)}"
        )
    axes = int(space.removesuffix("]").split("[")[1])
    if len(global_size) != axes:
        raise ValueError(
            f"`global_size` must have {axes} axes for {kernel.__name__}, got {list(global_size)}"
        )
    with_memory = [name for name, text in zip(list(kernel.__annotations__)[1:], texts) if _has_memory(text)]
    memories = [_pointer(*each) for each in zip(with_memory, flat, pointers)]
    numbers = [np.dtype(kind).type(value) for kind, value in zip(flat[len(memories) :], scalars)]
    arguments = parameters.grouped(texts, memories, numbers, _view)
    if local_size is None:
        local_size = [size or 1 for size in global_size]
    if len(local_size) != axes or any(items % local for items, local in zip(global_size, local_size)):
        raise ValueError(
            f"`global_size` must be whole work-groups of {list(local_size)}, got {list(global_size)}"
        )
    meets = any(getattr(each, "together", False) for each in source.functions(kernel))
    run = _run_together if meets else _run_in_turn
    for group in _places([items // local for items, local in zip(global_size, local_size)]):
        starts = [place * local for place, local in zip(group, local_size)]
        places = ([start + step for start, step in zip(starts, steps)] for steps in _places(local_size))
        run(kernel, [Item(place, local_size) for place in places], arguments)


def _has_memory(text: str) -> bool:
    return parameters.parse(text).kind in ("view", "pointer")


def _pointer(name: str, text: str, value: Any) -> Pointer:
    """A pointer argument, of the element type that the annotation says."""
    if not isinstance(value, Pointer):
        if not value.flags.c_contiguous:
            raise ValueError(f"`{name}` must be contiguous or a Pointer, got strides {list(value.strides)}")
        value = Pointer(value.reshape(-1))
    element = text[:-1]
    element = _STORED.get(element, element)
    if isinstance(getattr(np, element, None), type) and value.memory.dtype != element:
        raise TypeError(f"`{name}` must be {element}, got {value.memory.dtype}")
    return value


def _view(parameter: parameters.Parameter, pointer: Pointer, strides: Sequence[Any]) -> View:
    known = isinstance(getattr(np, parameter.element, None), type) or parameter.element in _STORED
    # A type variable without a value: the memory's own type.
    element = parameter.element if known else pointer.memory.dtype.name
    return View(parameter._replace(element=element), pointer, strides)


def _places(sizes: Sequence[int]) -> Any:
    """Every place of an index space, axis 0 the fastest."""
    for place in itertools.product(*(range(size) for size in reversed(sizes))):
        yield place[::-1]


def _run_in_turn(kernel: Callable, items: Sequence[Item], arguments: Sequence[Any]) -> None:
    for item in items:
        _run(kernel, item, arguments)


def _run_together(kernel: Callable, items: Sequence[Item], arguments: Sequence[Any]) -> None:
    """The items of one work-group, each in a thread, so that they can wait for one another."""
    group = Group(len(items))
    errors: list[BaseException] = []

    def run(number: int, item: Item) -> None:
        intrinsics.current.group, intrinsics.current.number = group, number
        try:
            _run(kernel, item, arguments)
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if causes:
        raise causes[0]
    if errors:
        raise RuntimeError(f"items of {kernel.__name__} wait at a barrier that others never reach")


def _run(kernel: Callable, item: Item, arguments: Sequence[Any]) -> None:
    """One item; as on a device, no arithmetic raises."""
    with np.errstate(all="ignore"):
        kernel(item, *arguments)
