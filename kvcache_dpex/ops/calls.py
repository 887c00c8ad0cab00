"""Launches for calls of one kind, found by the addresses of their arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ..runtime.compile import store
from ..runtime.launch import launch, scratch
from ..runtime.launch.arrays import Operand
from .overlap import Guard

if TYPE_CHECKING:
    import dpctl

    from .operation import Operation

Launched = Callable[[tuple[int, ...], Any], None]


class Result(NamedTuple):
    """What an operation returns: an array of this shape and dtype, new unless `out` is given."""

    shape: tuple[int, ...]
    dtype: str


class Plan(NamedTuple):
    """A kernel for one choice of its types, the values of its numbers, and its index space."""

    kernel: Callable
    types: dict[str, str]
    queue: dpctl.SyclQueue
    scalars: tuple[int, ...]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]


class Steps(NamedTuple):
    """Plans that run one after the other and hand results on in memory of their own.

    Attributes
    ----------
    plans
        Each plan with the names of the operation's arrays that its kernel takes, in order; ``"scratch"`` is
        the memory that the steps share.
    scratch
        Bytes of that memory, which holds anything at first.
    """

    plans: tuple[tuple[Plan, tuple[str, ...]], ...]
    scratch: int


class LaunchedSteps:
    """The launches of `Steps`; calls at the same time get scratch memory of their own."""

    def __init__(self, steps: Steps, names: Sequence[str]) -> None:
        places = {name: at for at, name in enumerate((*names, "scratch"))}
        self._launches = [
            (settings.launch(plan), operator.itemgetter(*(places[name] for name in taken)))
            for plan, taken in steps.plans
        ]
        self._size = steps.scratch
        self._scratch = scratch.of_queue(steps.plans[0][0].queue)

    def __call__(self, pointers: tuple[int, ...], owners: Any) -> None:
        with self._scratch.lent(self._size) as memory:
            pointers, owners = (*pointers, memory._pointer), (*owners, memory)
            for launched, take in self._launches:
                launched(take(pointers), take(owners))


def launch_of(
    plan: Plan, load: Callable[..., store.Module] = store.load, new: Callable[..., Launched] = launch.Launch
) -> Launched:
    """The launch of a plan, its kernel found or compiled by `load`."""
    __tracebackhide__ = True
    module = load(plan.kernel, **plan.types)
    return new(module, plan.queue, plan.scalars, plan.global_size, plan.local_size)


class Settings(NamedTuple):
    """What tests and benchmarks may replace; see `using`."""

    launch: Callable[[Plan], Launched] = launch_of
    variant: str | None = None  # a kernel to take wherever it fits; elsewhere the last variant


settings = Settings()


class Kind(dict):
    """The launches of calls with equal metadata and options, by the addresses of their arrays.

    Alignment and overlap depend on the addresses. Those that were seen before need no second look: engines
    and allocators use the same memory again and again.
    """

    MOST = 1024

    def __init__(self, operation: Operation, operands: Sequence[Operand | None], options: tuple) -> None:
        super().__init__()
        self._operation, self._operands, self._options = operation, operands, options
        self._by_alignment: dict[int, Launched] = {}
        kinds = [array.kind for array in operation.arrays]
        self._guard = Guard(
            [array.name for array in operation.arrays], kinds, operands, operation.may_overlap
        )

    def __missing__(self, addresses: tuple[int, ...]) -> Launched:
        alignment = self._operation.alignment_of(addresses)
        found = self._by_alignment.get(alignment)
        if found is None:
            named = self._operation.by_name(self._operands, self._options)
            plan = self._operation.plan(**named, alignment=alignment)
            found = self._by_alignment[alignment] = self._launched(plan)
        if found is not launch.nothing:
            self._guard.require_disjoint(addresses)
        if len(self) >= self.MOST:
            self.clear()
        self[addresses] = found
        return found

    def _launched(self, plan: Plan | Steps | None) -> Launched:
        if isinstance(plan, Steps):
            return LaunchedSteps(plan, [array.name for array in self._operation.arrays])
        return settings.launch(plan) if plan else launch.nothing
