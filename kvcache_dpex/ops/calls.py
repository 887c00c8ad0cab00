"""Launches for calls of one kind, found by the addresses of their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ..runtime.compile import store
from ..runtime.launch import launch
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


def launch_of(
    plan: Plan, load: Callable[..., store.Module] = store.load, new: Callable[..., Launched] = launch.Launch
) -> Launched:
    """The launch of a plan, its kernel found or compiled by `load`."""
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
            found = self._by_alignment[alignment] = settings.launch(plan) if plan else launch.nothing
        if found is not launch.nothing:
            self._guard.require_disjoint(addresses)
        if len(self) >= self.MOST:
            self.clear()
        self[addresses] = found
        return found
