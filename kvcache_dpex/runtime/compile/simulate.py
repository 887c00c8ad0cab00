"""Runs a kernel as plain Python over NumPy memory: no device, no compiler, and a debugger works.

Every access is checked: an index outside of the memory raises, where a device would read or destroy
whatever lies there.
"""

# Not `from __future__ import annotations`: a kernel's annotations, as in the example, must stay as they are.
import itertools
import threading
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np

from ...kernels import device
from . import source

_TOGETHER = {"barrier", "group_larger", "get_local", "put_local"}
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
        self._brought: list = []
        self._largest: Any = None

    def barrier(self) -> None:
        self._barrier.wait()

    def abort(self) -> None:
        self._barrier.abort()

    def larger(self, bits: Any) -> Any:
        self._brought.append(bits)
        self._barrier.wait()
        return self._largest

    def put(self, index: int, bits: Any) -> None:
        if not 0 <= index < device.LOCAL_WORDS:
            raise IndexError(f"index {index} lies outside of the {device.LOCAL_WORDS} words of a work-group")
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
        self._largest = max(self._brought, default=None)
        self._brought = []


def simulate(
    kernel: Callable,
    global_size: Sequence[int],
    pointers: Sequence[Any],
    scalars: Sequence[Any] = (),
    local_size: Optional[Sequence[int]] = None,
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
        A contiguous NumPy array, or a `Pointer`, for each pointer argument.
    scalars
        A number for each scalar argument.
    local_size
        Items of a work-group along each axis; by default one group holds them all.

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
    (_, space), *parameters = kernel.__annotations__.items()
    values = [*pointers, *scalars]
    if len(values) != len(parameters):
        names = ", ".join(name for name, _ in parameters)
        raise TypeError(f"{kernel.__name__} takes {len(parameters)} arguments ({names}), got {len(values)}")
    axes = int(space.removesuffix("]").split("[")[1])
    if len(global_size) != axes:
        raise ValueError(
            f"`global_size` must have {axes} axes for {kernel.__name__}, got {list(global_size)}"
        )
    arguments = [_argument(name, text, value) for (name, text), value in zip(parameters, values)]
    if local_size is None:
        local_size = [size or 1 for size in global_size]
    if len(local_size) != axes or any(items % local for items, local in zip(global_size, local_size)):
        raise ValueError(
            f"`global_size` must be whole work-groups of {list(local_size)}, got {list(global_size)}"
        )
    run = _run_together if _work_together(kernel) else _run_in_turn
    for group in _places([items // local for items, local in zip(global_size, local_size)]):
        starts = [place * local for place, local in zip(group, local_size)]
        places = ([start + step for start, step in zip(starts, steps)] for steps in _places(local_size))
        run(kernel, [Item(place, local_size) for place in places], arguments)


def _argument(name: str, text: str, value: Any) -> Any:
    """A value as the kernel's annotation wants it."""
    if not text.endswith("*"):
        return np.dtype(text).type(value)
    if not isinstance(value, Pointer):
        if not value.flags.c_contiguous:
            raise ValueError(f"`{name}` must be contiguous or a Pointer, got strides {list(value.strides)}")
        value = Pointer(value.reshape(-1))
    element = text[:-1]
    if isinstance(getattr(np, element, None), type) and value.memory.dtype != element:
        raise TypeError(f"`{name}` must be {element}, got {value.memory.dtype}")
    return value


def _places(sizes: Sequence[int]) -> Any:
    """Every place of an index space, axis 0 the fastest."""
    for place in itertools.product(*(range(size) for size in reversed(sizes))):
        yield place[::-1]


def _work_together(kernel: Callable) -> bool:
    """Whether the items of a group wait for one another or share memory."""
    functions = kernel, *source.helpers(kernel)
    return any(_TOGETHER.intersection(function.__code__.co_names) for function in functions)


def _run_in_turn(kernel: Callable, items: Sequence[Item], arguments: Sequence[Any]) -> None:
    for item in items:
        _run(kernel, item, arguments)


def _run_together(kernel: Callable, items: Sequence[Item], arguments: Sequence[Any]) -> None:
    """The items of one work-group, each in a thread, so that they can wait for one another."""
    group = Group(len(items))
    errors: list[BaseException] = []

    def run(item: Item) -> None:
        device.current.group = group
        try:
            _run(kernel, item, arguments)
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(item,)) for item in items]
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
