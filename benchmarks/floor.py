"""The least that any operation costs: a launch that does nothing."""

from typing import Any, Callable

from kvcache_dpex.kernels.scatter import scatter
from kvcache_dpex.runtime import compiler, launch, store


def nothing(item: "item[1]", pointer: "uint64*"):
    """Do nothing."""


def empty_launch(queue: Any) -> tuple[Callable[[], None], str]:
    """A launch that does nothing, on a queue, and what it is."""
    from dpctl.memory import MemoryUSMDevice

    memory = MemoryUSMDevice(64, queue=queue)
    if compiler.available():
        what = "an empty kernel with one argument"
        prepared = launch.Launch(store.load(nothing), queue, (), (1,), (1,))
        pointers: tuple[int, ...] = (memory._pointer,)
    else:
        what = "the write kernel for no tokens (an empty kernel needs numba-dpex)"
        module = store.load(scatter, slot="int64")
        prepared = launch.Launch(module, queue, (0,) * 8, (1, 1), (1, 1))
        pointers = (memory._pointer,) * 5
    return lambda: prepared(pointers, memory), what
