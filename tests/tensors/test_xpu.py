"""XPU tensors through a stand-in: tensors that say they are on an XPU, and a stream that is a queue of SYCL.

What is real here: adopting a queue by its address, building and launching on it, tensors' pointers. What
is not: the device (the CPU), and torch's XPU memory. Nothing here has run on an Intel GPU.
"""

import functools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tensor_cases import contiguous_case  # noqa: E402

from kvcache_dpex import torch as kv  # noqa: E402
from kvcache_dpex.ops.calls import launch_of  # noqa: E402
from kvcache_dpex.ops.operation import OPERATIONS, using  # noqa: E402
from kvcache_dpex.runtime.environment import compatibility, devices  # noqa: E402
from kvcache_dpex.runtime.launch import arrays, exchange, launch, order, xpu  # noqa: E402

SLOTS = [7, -1, 19, 0, 20, 3]


class XpuTensor(torch.Tensor):
    """A tensor that says it is on an XPU."""

    is_cpu = property(lambda self: False)
    is_xpu = property(lambda self: True)
    device = property(lambda self: SimpleNamespace(type="xpu", index=getattr(self, "number", 0)))


class Stream:
    """torch's stream in front of a queue: its address, its number, and whether it was waited for."""

    def __init__(self, queue, stream_id=1):
        self.queue = queue
        self.sycl_queue = queue.addressof_ref()
        self.stream_id = stream_id or self.sycl_queue
        self.waits = 0

    def synchronize(self):
        self.waits += 1
        self.queue.wait()


def on_xpu(tensor):
    return tensor.as_subclass(XpuTensor)


def case():
    return [on_xpu(tensor) for tensor in (*contiguous_case(), torch.tensor(SLOTS))]


def new_queue():
    return devices.load_dpctl().SyclQueue(devices.queue_for("cpu").sycl_device, property="in_order")


@pytest.fixture
def streams(monkeypatch):
    """The current stream of each XPU, to be changed by the test."""
    found = {0: Stream(new_queue()), 1: Stream(new_queue())}
    monkeypatch.setattr(torch.xpu, "current_stream", found.__getitem__)
    monkeypatch.setattr(xpu, "_adopted", {})
    with using():
        yield found


def queue_of(tensor):
    return arrays.Operand(*arrays.read(tensor, "tensor")[1]).queue


def test_the_write_runs_on_the_queue_of_the_current_stream(streams):
    key, value, key_cache, value_cache, slots = case()
    kv.reshape_and_cache(key, value, key_cache, value_cache, slots)
    queue = queue_of(key)
    assert queue == streams[0].queue
    assert queue.sycl_context == streams[0].queue.sycl_context
    (kind,) = OPERATIONS["reshape_and_cache"].prepared.values()
    assert [launch.queue for launch in kind.values()] == [queue]
    assert torch.equal(key_cache[1, 3].as_subclass(torch.Tensor), key[0].as_subclass(torch.Tensor))
    assert streams[0].waits == 0


def test_another_current_stream_is_another_queue(streams):
    tensor = case()[0]
    first = queue_of(tensor)
    assert queue_of(tensor) is first
    streams[0] = Stream(new_queue())
    second = queue_of(tensor)
    assert second == streams[0].queue
    assert second != first


def test_a_stream_made_from_an_outside_queue_is_adopted_anew(streams):
    tensor = case()[0]
    streams[0] = Stream(new_queue(), stream_id=None)
    assert queue_of(tensor) == streams[0].queue
    assert queue_of(tensor) is not queue_of(tensor)


def test_an_adopted_queue_outlives_the_stream(streams):
    tensor = case()[0]
    queue = queue_of(tensor)
    expected = queue.sycl_device
    streams.clear()
    queue.wait()
    assert queue.sycl_device == expected


def test_tensors_of_two_xpus_are_refused(streams):
    arguments = case()
    arguments[1].number = 1
    with pytest.raises(ValueError, match=r"`value` must be on the queue of `key`.*value.to\(key.device\)"):
        kv.reshape_and_cache(*arguments)


def test_cpu_tensors_among_xpu_tensors_are_refused(streams):
    arguments = case()
    arguments[3] = arguments[3].as_subclass(torch.Tensor)
    with pytest.raises(ValueError, match="`value_cache` must be on the queue of `key`"):
        kv.reshape_and_cache(*arguments)


def test_the_operations_are_registered_for_xpu():
    for name in (
        "reshape_and_cache",
        "reshape_and_cache_quant",
        "dequant_cache",
        "dequant_cache_out",
    ):
        for key in ("CPU", "XPU"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"kvcache_dpex::{name}", key)


def test_a_foreign_sycl_runtime_is_told_before_a_queue_is_adopted(streams, monkeypatch):
    monkeypatch.setattr(compatibility, "mismatch", lambda: "torch brings another runtime")
    compatibility.require_match.cache_clear()
    with pytest.raises(RuntimeError, match="torch brings another runtime"):
        queue_of(case()[0])
    compatibility.require_match.cache_clear()


def test_a_tensor_of_an_xpu_becomes_an_array_once_its_stream_is_done(streams):
    tensor = kv.to_torch(devices_array())
    array = kv.from_torch(on_xpu(tensor))
    assert streams[0].waits == 1
    assert array.get_array()._pointer == tensor.data_ptr()
    assert array.sycl_queue == devices.queue_for("cpu")


def devices_array():
    return arrays.tensor_module().ones((2, 3), dtype="f4", sycl_queue=devices.queue_for("cpu"))


class GpuArray(SimpleNamespace):
    """What to_torch takes for a usm_ndarray."""

    __sycl_usm_array_interface__ = None


def gpu_array(events, *, usm_type="device", backend="level_zero", context="default"):
    """An array of a GPU that notes what is asked of it."""

    def dlpack(**options):
        events.append(("exported", options))
        return "capsule"

    platform = SimpleNamespace(default_context="default")
    device = SimpleNamespace(
        is_cpu=False,
        is_gpu=True,
        name="a GPU",
        filter_string="a:gpu:0",
        backend=SimpleNamespace(name=backend),
        sycl_platform=platform,
    )
    return GpuArray(
        strides=(3, 1),
        dtype=torch.float32,
        flags=SimpleNamespace(writable=True),
        usm_type=usm_type,
        sycl_device=device,
        sycl_context=context,
        sycl_queue=SimpleNamespace(wait=lambda: events.append("waited")),
        __dlpack__=dlpack,
    )


def test_an_array_of_a_gpu_is_waited_for_and_exported_without_arguments(monkeypatch):
    events = []
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(
        torch, "from_dlpack", lambda capsule: torch.zeros(2, 3) if capsule == "capsule" else None
    )
    assert kv.to_torch(gpu_array(events), torch.int32).dtype == torch.int32
    assert events == ["waited", ("exported", {})]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"usm_type": "shared"}, "`array` must be of USM type 'device' for torch's XPU, got 'shared'"),
        ({"backend": "opencl"}, "`array` must be in the default context of a Level Zero platform.*a:gpu:0"),
        ({"context": "another"}, "`array` must be in the default context"),
    ],
    ids=["usm_type", "backend", "context"],
)
def test_arrays_that_torch_would_refuse_on_an_xpu(options, message, monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    with pytest.raises(ValueError, match=message):
        exchange.to_torch(gpu_array([], **options))


def test_an_array_of_a_gpu_needs_a_torch_for_it(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"`array` is on a GPU, which this torch .* does not reach"):
        exchange.to_torch(gpu_array([]))


def test_a_foreign_sycl_runtime_is_told_before_an_array_is_exported(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(compatibility, "mismatch", lambda: "torch brings another runtime")
    compatibility.require_match.cache_clear()
    events = []
    with pytest.raises(RuntimeError, match="torch brings another runtime"):
        exchange.to_torch(gpu_array(events))
    compatibility.require_match.cache_clear()
    assert events == ["waited"]


class OnSecondXpu(torch.Tensor):
    device = "xpu:1"


def test_a_result_is_on_the_device_of_its_source(monkeypatch):
    """Decoding a cache on an XPU makes a tensor on that XPU, not on the CPU."""
    asked = []
    monkeypatch.setattr(torch, "empty", lambda shape, **options: asked.append((shape, options)))
    arrays.empty_like(torch.zeros(1).as_subclass(OnSecondXpu), (2, 3), "float16")
    assert asked == [((2, 3), {"dtype": torch.float16, "device": "xpu:1"})]


def test_operands_of_torchs_stream_are_left_to_torch(streams, monkeypatch):
    """Their memory goes only to later work of the stream; a host task would hold that up."""
    held = []
    monkeypatch.setattr(order, "capsule", lambda *arguments: held.append(arguments))
    key, value, key_cache, value_cache, slots = case()
    new = functools.partial(launch.Launch, order=order.Asynchronous)
    with using(launch=functools.partial(launch_of, new=new), variant="scatter_gpu"):
        kv.reshape_and_cache(key, value, key_cache, value_cache, slots)
    streams[0].queue.wait()
    assert held == []
    assert torch.equal(key_cache[1, 3].as_subclass(torch.Tensor), key[0].as_subclass(torch.Tensor))
