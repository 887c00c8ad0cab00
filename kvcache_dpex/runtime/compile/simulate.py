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
from .memory import STORED, Pointer, View

_PATIENCE = 30  # seconds that an item waits at a barrier that another item never reaches


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
    element = STORED.get(element, element)
    if isinstance(getattr(np, element, None), type) and value.memory.dtype != element:
        raise TypeError(f"`{name}` must be {element}, got {value.memory.dtype}")
    return value


def _view(parameter: parameters.Parameter, pointer: Pointer, strides: Sequence[Any]) -> View:
    known = isinstance(getattr(np, parameter.element, None), type) or parameter.element in STORED
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
