"""Launches: order with dpnp's own work, lifetime of arguments, threads, and what a driver refuses."""

import gc
import re
import struct
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import Twins, contiguous_case, sentinel, to_bytes, to_device
from kvcache_dpex import empty_cache, reference, reshape_and_cache
from kvcache_dpex.kernels.scatter_cpu import scatter_cpu
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.ops import plan, write
from kvcache_dpex.runtime.compile import spirv, store
from kvcache_dpex.runtime.launch import arrays, launch


@pytest.fixture(params=["out of order", "in order"])
def any_queue(request, queue):
    """The device's usual queue, and an in-order one such as torch's streams are."""
    import dpctl

    if request.param == "in order":
        return dpctl.SyclQueue(queue.sycl_device, property="in_order")
    return queue


@pytest.fixture(params=["as on this device", "without waiting"])
def waiting(request, monkeypatch, any_queue):
    """Launches that return before the kernel has ended, as on a GPU, also where the device is a CPU."""
    monkeypatch.setattr(write, "_launches", {})
    if request.param == "without waiting":
        if not (any_queue.is_in_order or launch._order_manager()):
            pytest.skip("this dpctl cannot order work on an out-of-order queue; every launch waits")

        class Asynchronous(launch.Launch):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                self._waits, self._waiting_queue = False, self._queue

        monkeypatch.setattr(launch, "Launch", Asynchronous)
        with plan.prefer("scatter_gpu"):
            yield request.param
    else:
        yield request.param


@pytest.mark.parametrize("size", [128, 3])
def test_after_dpnps_earlier_work(any_queue, waiting, size):
    """dpnp takes milliseconds over a large array; the write of its last rows must not overtake it."""
    import dpnp

    key_cache, value_cache = empty_cache(2, 4, 8, size, device=any_queue)
    large = dpnp.zeros((4_000_000 // size // 8, 8, size), dtype="float32", sycl_queue=any_queue)
    slots = dpnp.arange(8, dtype="int64", sycl_queue=any_queue)
    for turn in range(1, 11):
        dpnp.add(large, 1, out=large)
        reshape_and_cache(large[-8:], large[-8:], key_cache, value_cache, slots)
        assert (arrays.to_numpy(key_cache) == turn).all()
        assert (arrays.to_numpy(value_cache) == turn).all()


@pytest.mark.parametrize("size", [128, 3])
def test_before_dpnps_later_work(any_queue, waiting, size):
    """The write takes milliseconds; dpnp's reading of the last slots must not overtake it."""
    import dpnp

    tokens = 4_000_000 // size // 8 // 16 * 16
    key_cache, value_cache = empty_cache(tokens // 16, 16, 8, size, device=any_queue)
    slots = dpnp.arange(tokens, dtype="int64", sycl_queue=any_queue)
    key = dpnp.zeros((tokens, 8, size), dtype="float32", sycl_queue=any_queue)
    for turn in range(1, 11):
        dpnp.add(key, 1, out=key)
        any_queue.wait()
        reshape_and_cache(key, key, key_cache, value_cache, slots)
        seen = dpnp.copy(key_cache[-1:]), dpnp.copy(value_cache[-1:])
        dpnp.add(key, 0.5, out=key)
        dpnp.subtract(key, 0.5, out=key)
        for part in seen:
            assert (arrays.to_numpy(part) == turn).all()


def test_arguments_live_until_the_kernel_has_ended(any_queue, waiting):
    """A41: 300 launches on temporaries that are deleted at once, with garbage collected and memory reused."""
    import dpnp

    tokens, size = 32, 64
    key_cache, value_cache = empty_cache(300, tokens, 1, size, device=any_queue)
    for turn in range(300):
        key = dpnp.full((tokens, 1, size), turn + 1, dtype="float32", sycl_queue=any_queue)
        slots = dpnp.arange(turn * tokens, (turn + 1) * tokens, dtype="int64", sycl_queue=any_queue)
        reshape_and_cache(key, -key, key_cache, value_cache, slots)
        del key, slots
        if turn % 50 == 0:
            gc.collect()
        dpnp.full((tokens, 1, size), np.nan, dtype="float32", sycl_queue=any_queue)
    wanted = np.arange(1, 301, dtype="float32")[:, None, None, None]
    np.testing.assert_array_equal(arrays.to_numpy(key_cache), np.broadcast_to(wanted, key_cache.shape))
    np.testing.assert_array_equal(arrays.to_numpy(value_cache), np.broadcast_to(-wanted, value_cache.shape))


def test_arguments_are_held_while_the_kernel_runs_and_let_go_later(queue, monkeypatch):
    """A41: what is held is let go at a later launch, once its event is complete and not before."""
    import dpctl

    running = dpctl.event_status_type.running
    complete = dpctl.event_status_type.complete

    class Event:
        execution_status = running

    monkeypatch.setattr(launch, "_running", deque())
    events = [Event(), Event(), Event()]
    alive = []
    for event in events[:2]:
        owner = np.zeros(1)
        alive.append(weakref.ref(owner))
        launch._keep_until_done(event, (owner,), None)
        del owner
    gc.collect()
    assert all(reference() is not None for reference in alive)
    events[0].execution_status = complete
    launch._keep_until_done(events[2], (), None)
    assert [reference() is None for reference in alive] == [True, False]


def test_threads(queue, monkeypatch):
    """Eight threads, the first call of each at the same time, into one cache and with one mapping each."""
    monkeypatch.setattr(write, "_launches", {})
    monkeypatch.setattr(launch, "_built", {})
    store.load.cache_clear()
    rng = np.random.default_rng(4)
    rounds, workers, tokens = 40, 8, 5
    blocks = workers * tokens // 4
    together = threading.Barrier(workers)
    for size in (8, 3):
        key_cache, value_cache = (sentinel((blocks, 4, 2, size), "float32") for _ in range(2))
        cases = []
        for worker in range(workers):
            key, value, _, _ = contiguous_case(rng, "float32", tokens=tokens, size=size)
            slots = rng.permutation(np.arange(worker * tokens, (worker + 1) * tokens))
            cases.append((key, value, key_cache, value_cache, slots))
        twins = Twins(queue)
        on_device = [[twins.view(array) for array in case] for case in cases]

        def work(arguments):
            together.wait()
            for _ in range(rounds):
                reshape_and_cache(*arguments)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, on_device))
        for case in cases:
            reference.reshape_and_cache(*case)
        twins.assert_equal()


def test_threads_that_write_one_slot(queue):
    """One launch, arguments of its own for each thread: every element is one of the rows'."""
    rows = [np.full((1, 2, 512), number, "float32") for number in range(1, 9)]
    key_cache, value_cache = empty_cache(2, 4, 2, 512, device=queue)
    slots = to_device(np.array([5]), queue)
    keys = [to_device(row, queue) for row in rows]

    def work(key):
        for _ in range(40):
            reshape_and_cache(key, key, key_cache, value_cache, slots)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, keys))
    for cache in (key_cache, value_cache):
        found = arrays.to_numpy(cache)
        assert set(found[1, 1].ravel()) <= set(range(1, 9))
        found[1, 1] = 0
        assert not to_bytes(found).any()


def test_an_interrupted_call_ends_with_its_kernel(any_queue, waiting, monkeypatch):
    """Ctrl-C after the submission of a write of milliseconds: what it uses may be freed after the call."""
    tokens = 8192
    key_cache, value_cache = empty_cache(tokens // 16, 16, 8, 128, device=any_queue)
    key = to_device(np.ones((tokens, 8, 128), "float32"), any_queue)
    slots = to_device(np.arange(tokens), any_queue)
    submit = launch.Launch._submit_after

    def interrupted(*arguments):
        submit(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(launch.Launch, "_submit_after", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reshape_and_cache(key, key, key_cache, value_cache, slots)
    (prepared,) = write._launches.values()
    assert prepared._spare == []
    assert (arrays.to_numpy(value_cache[-1:]) == 1).all()
    reshape_and_cache(key, key, key_cache, value_cache, slots)
    assert len(prepared._spare) == 1


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


def test_a_record_is_never_handed_to_a_gpu():
    """The next call fills it in again, and a GPU's calls do not wait."""
    gpu = SimpleNamespace(sycl_device=SimpleNamespace(is_cpu=False, name="some GPU"))
    module = store.load(scatter_cpu, slot="int64")
    with pytest.raises(ValueError, match=r"^kernel scatter_cpu-int64 takes a record .*, got some GPU$"):
        launch.Launch(module, gpu, (1,) * 8, (8, 1), (8, 1))


def test_a_module_that_the_driver_refuses(queue):
    """It asks for a capability that no device has, as float64 is one that Iris Xe has not."""
    module = store.load(scatter_gpu, slot="int64")
    unknown = struct.pack("<2I", 2 << 16 | spirv.OP_CAPABILITY, 9999)
    broken = module._replace(binary=module.binary[:20] + unknown + module.binary[20:], identity="broken")
    name = re.escape(queue.sycl_device.name)
    with pytest.raises(RuntimeError, match=f"^the driver of {name} refuses kernel scatter_gpu-int64: "):
        launch.build(broken, queue)


def test_a_kernel_is_built_once_for_a_context(queue, monkeypatch):
    """A45: the kernel bundle is kept, for each context of its own."""
    import dpctl

    monkeypatch.setattr(launch, "_built", {})
    module = store.load(scatter_gpu, slot="int64")
    assert launch.build(module, queue) is launch.build(module, queue)
    same_context = dpctl.SyclQueue(queue.sycl_context, queue.sycl_device)
    assert launch.build(module, same_context) is launch.build(module, queue)
    other = dpctl.SyclQueue(dpctl.SyclContext([queue.sycl_device]), queue.sycl_device)
    assert launch.build(module, other) is not launch.build(module, queue)
    assert len(launch._built) == 2


def test_launches_of_many_geometries_are_forgotten():
    prepared = dict.fromkeys(range(4096))
    launch.make_room(prepared)
    assert prepared == {}
    prepared = dict.fromkeys(range(4095))
    launch.make_room(prepared)
    assert len(prepared) == 4095
