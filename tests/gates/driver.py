"""What is run beside a simulated GPU: every operation, and launches that must be refused.

``python -m tests.gates.driver operations`` prints a report as JSON. No result of a kernel is looked at:
nothing executes there.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import kvcache_dpex
from kvcache_dpex.commands import check
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.runtime.compile import store
from kvcache_dpex.runtime.environment import devices
from kvcache_dpex.runtime.launch import arrays, launch

from .cases import Case, all_cases, owner, start


def operations() -> dict[str, Any]:
    """Launch every case and the whole `check`; say what was launched, and where."""
    queue = devices.queue_for()
    device = queue.sycl_device
    launched: dict[str, int] = {}
    build = launch.Launch.__init__

    def counted(self, module, queue, scalars, global_size, local_size):
        build(self, module, queue, scalars, global_size, local_size)
        launched[module.name] = max(launched.get(module.name, 0), math.prod(local_size))

    launch.Launch.__init__ = counted
    caches = [*kvcache_dpex.empty_cache(4, 16, 8, 128), *kvcache_dpex.empty_quant_cache(4, 16, 8, 128)]
    for case in all_cases():
        case.call(on_device(case, queue))
    queue.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `check` divides by scales that no kernel wrote
        claims = [claim for claim, _ in check.validations(queue)]
    return {
        "device": device.filter_string,
        "fp64": device.has_aspect_fp64,
        "limit": device.max_work_group_size,
        "caches": sorted({cache.sycl_queue.sycl_device.filter_string for cache in caches}),
        "groups": launched,
        "claims": claims,
    }


def on_device(case: Case, queue: Any) -> dict[str, Any]:
    """The arguments as usm_ndarrays: the same views of buffers of the device."""
    from dpctl.memory import MemoryUSMDevice

    memory: dict[int, Any] = {}
    views = {}
    for name, view in case.arguments.items():
        buffer = owner(view)
        if id(buffer) not in memory:
            memory[id(buffer)] = MemoryUSMDevice(buffer.nbytes, queue=queue)
            memory[id(buffer)].copy_from_host(buffer.reshape(-1).view(np.uint8))
        views[name] = arrays.tensor_module().usm_ndarray(
            view.shape,
            dtype=view.dtype,
            buffer=memory[id(buffer)],
            offset=start(view) // view.itemsize,
            strides=tuple(stride // view.itemsize for stride in view.strides),
        )
    return views


def group(size: str) -> None:
    """Launch a packaged kernel in work-groups of a size."""
    queue = devices.queue_for()
    memory = kvcache_dpex.empty_cache(1, 16, 8, 128)[0].get_array()._pointer
    module = store.load(scatter_gpu, slot="int64")
    scalars = (0,) * sum(not argument.endswith("*") for argument in module.arguments)
    launch.Launch(module, queue, scalars, (int(size), 1), (int(size), 1))((memory,) * 5)
    queue.wait()


def build(file: str) -> None:
    """Build a module that is in a file."""
    module = store.load(scatter_gpu, slot="int64")
    binary = Path(file).read_bytes()
    launch.build(module._replace(name=Path(file).stem, identity=file, binary=binary), devices.queue_for())


if __name__ == "__main__":
    result = {"operations": operations, "group": group, "build": build}[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(result))
