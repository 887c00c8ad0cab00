"""What a launch refuses, and that a kernel is built once."""

import re
import struct

import numpy as np
import pytest

from helpers import to_device
from kvcache_dpex.kernels.scatter_cpu import scatter_cpu
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.runtime.compile import spirv, store
from kvcache_dpex.runtime.launch import arrays, launch, order


def test_a_launch_that_the_device_refuses(queue):
    """A work-group above the device's limit: an error, not silence."""
    module = store.load(scatter_gpu, slot="int64")
    limit = queue.sycl_device.max_work_group_size
    too_large = launch.Launch(module, queue, (1,) * 8, (2 * limit, 1), (2 * limit, 1))
    message = (
        f"the SYCL runtime refused to launch <launch of scatter_gpu-int64, global [{2 * limit}, 1], "
        f"local [{2 * limit}, 1]>; see its message above"
    )
    memory = to_device(np.zeros(64, "uint8"), queue)
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        too_large((arrays.read(memory, "memory")[0],) * 5, memory)


def test_a_record_is_never_handed_to_a_launch_that_does_not_wait(queue):
    """The next call fills it in again."""
    module = store.load(scatter_cpu, slot="int64")
    name = re.escape(queue.sycl_device.name)
    with pytest.raises(ValueError, match=rf"^kernel scatter_cpu-int64 takes a record .*, got {name}$"):
        launch.Launch(module, queue, (1,) * 8, (8, 1), (8, 1), order.Asynchronous)


@pytest.mark.parametrize(
    ("is_cpu", "in_order", "managed", "policy"),
    [
        (True, False, True, order.Blocking),
        (True, True, True, order.Blocking),
        (False, False, True, order.Asynchronous),
        (False, True, False, order.Asynchronous),
        (False, False, False, order.Blocking),
    ],
)
def test_who_waits(queue, monkeypatch, is_cpu, in_order, managed, policy):
    """A GPU's launch does not, unless dpnp's own operations block there."""

    class Queue:
        """A queue that says it is of another device."""

        sycl_device = type("Device", (), {"is_cpu": is_cpu})
        is_in_order = in_order
        sycl_context = queue.sycl_context
        addressof_ref, wait = queue.addressof_ref, queue.wait

    monkeypatch.setattr(order, "order_managers", lambda: {} if not managed else {queue: None})
    monkeypatch.setattr(order, "_companion", lambda queue: queue)
    monkeypatch.setattr(Queue, "queue", queue, raising=False)
    assert type(order.order_for(Queue())) is policy


def test_a_module_that_the_driver_refuses(queue):
    """It asks for a capability that no device has, as float64 is one that Iris Xe has not."""
    module = store.load(scatter_gpu, slot="int64")
    unknown = struct.pack("<2I", 2 << 16 | spirv.OP_CAPABILITY, 9999)
    broken = module._replace(binary=module.binary[:20] + unknown + module.binary[20:], identity="broken")
    name = re.escape(queue.sycl_device.name)
    with pytest.raises(RuntimeError, match=f"^the driver of {name} refuses kernel scatter_gpu-int64: "):
        launch.build(broken, queue)


def test_a_kernel_is_built_once_for_a_context(queue):
    """numba-dpex #1208: while a launch uses a kernel, another of the context does, too."""
    import dpctl

    module = store.load(scatter_gpu, slot="int64")
    first = launch.build(module, queue)
    assert launch.build(module, queue) is first
    same_context = dpctl.SyclQueue(queue.sycl_context, queue.sycl_device)
    assert launch.build(module, same_context) is first
    other = dpctl.SyclQueue(dpctl.SyclContext([queue.sycl_device]), queue.sycl_device)
    assert launch.build(module, other) is not first


def test_a_kernel_is_built_for_each_subgroup_size(queue):
    sizes = [size for size in queue.sycl_device.sub_group_sizes if size in (8, 16)]
    module = store.load(scatter_gpu, slot="int64")
    built = [launch.build(module, queue, size) for size in (None, *sizes)]
    assert len(set(map(id, built))) == len(built)
    assert [launch.build(module, queue, size) for size in (None, *sizes)] == built
