"""The least that any operation costs: a launch that does nothing."""

from typing import Any, Callable

from kvcache_dpex.kernels.scatter_cpu import scatter_cpu
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.runtime.compile import compiler, store
from kvcache_dpex.runtime.launch import launch


def nothing(item: "item[1]", number: "int64"):
    """Do nothing."""


def empty_launch(queue: Any) -> tuple[Callable[[], None], str]:
    """A launch that does nothing, on a queue, and what it is."""
    if compiler.available():
        prepared = launch.Launch(store.load(nothing), queue, (0,), (1,), (1,))
        return lambda: prepared(()), "an empty kernel with one number"
    from dpctl.memory import MemoryUSMDevice

    memory = MemoryUSMDevice(64, queue=queue)
    module = store.load(scatter_cpu if queue.sycl_device.is_cpu else scatter_gpu, slot="int64")
    prepared = launch.Launch(module, queue, (0,) * 8, (1, 1), (1, 1))
    pointers = (memory._pointer,) * 5
    what = "the write kernel for no tokens (an empty kernel needs numba-dpex)"
    return lambda: prepared(pointers, memory), what
