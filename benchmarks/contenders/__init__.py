"""Whoever takes part: for each operation, small functions that set a contender up.

A function takes a `Work` and gives a `Contender`, or raises `Absent` where it cannot take part. The
first of each operation is what the others are compared with; kind "copy" is the ceiling, "floor" what
no operation can be faster than.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from ..work import Contender, Work


class Entry(NamedTuple):
    """A contender before it is set up."""

    name: str
    kind: str
    set_up: Callable[[Work], Contender]


OURS = "kvcache_dpex, dpnp arrays"
OURS_TORCH = "kvcache_dpex, torch tensors"
OURS_COMPILED = "kvcache_dpex, torch tensors, in torch.compile"
EAGER, COMPILED = "torch eager", "torch.compile"
FLOOR = "launch of an empty kernel"
ENTRIES: dict[str, list[Entry]] = {"write": [], "int8": [], "fp8": [], "dequantize": []}


def entry(operation: str, name: str, kind: str = "rival") -> Callable:
    """Enter the decorated function."""

    def enter(set_up: Callable[[Work], Contender]) -> Callable[[Work], Contender]:
        ENTRIES[operation].append(Entry(name, kind, set_up))
        return set_up

    return enter


def torch_operations() -> Any:
    """The package's operations on tensors."""
    import kvcache_dpex.torch

    return kvcache_dpex.torch


def compiled(work: Work, function: Callable) -> Callable:
    """`function` through torch.compile, for these sizes alone."""
    work.torch._dynamo.reset()
    return work.torch.compile(function, dynamic=False, fullgraph=True)


def device_copy(work: Work, *sizes: int) -> Contender:
    """Copies of so many bytes by the SYCL runtime."""
    from dpctl.memory import MemoryUSMDevice

    copies = [(*(MemoryUSMDevice(size, queue=work.queue) for _ in range(2)), size) for size in sizes]

    def run() -> None:
        for to, origin, size in copies:
            work.queue.memcpy(to, origin, size)

    return work.on_device(run, (), waits=True)


from . import dequantize, fp8, int8, write  # noqa: E402, F401
