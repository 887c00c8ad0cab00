"""What a launch keeps alive, for how long, and that it leaves nothing behind.

Memory is measured in a child process over a thousandth to a tenth of the calls of a long run;
``KVCACHE_DPEX_FULL=1`` makes all of them.
"""

import gc
import os
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import output_of, to_device
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.runtime.compile import store
from kvcache_dpex.runtime.launch import arrays, launch, order

FULL = os.environ.get("KVCACHE_DPEX_FULL") == "1"

# A write of 8 tokens on an out-of-order queue, by the policy that the first argument names.
SETUP = """
import gc, random, signal, sys
import kvcache_dpex as kv
import dpctl, dpnp
from functools import partial
from kvcache_dpex.ops.calls import launch_of
from kvcache_dpex.ops.operation import using
from kvcache_dpex.runtime.launch import launch, order

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4

policy = getattr(order, {policy!r})
new = partial(launch.Launch, order=policy)
kernel = "scatter_gpu" if policy is order.Asynchronous else None
context = using(launch=partial(launch_of, new=new), variant=kernel)
context.__enter__()

def arguments(queue, blocks=4):
    caches = kv.empty_cache(blocks, 16, 8, 128, device=queue)
    key = dpnp.ones((8, 8, 128), dtype="float32", sycl_queue=queue)
    return key, key, *caches, dpnp.arange(8, dtype="int64", sycl_queue=queue)

queue = dpctl.SyclQueue({device!r})
case = arguments(queue)
"""


def in_child(code, policy, queue, **options):
    device = queue.sycl_device.filter_string
    return output_of(SETUP.format(policy=policy, device=device) + code, **options)


@pytest.mark.parametrize("policy", ["Blocking", "Asynchronous"])
def test_calls_leave_no_memory_behind(queue, policy):
    """dpctl #74: an event takes 2.5 KiB, so 8,000 that nobody deletes are 20 MiB."""
    code = f"""
for number in range({120_000 if FULL else 8_000} + 2000):
    kv.reshape_and_cache(*case)
    if number % 50 == 0:
        queue.wait()
    if number == 1999:
        before = resident()
queue.wait()
print(resident() - before)
"""
    assert int(in_child(code, policy, queue, timeout=600)) < 2048


@pytest.mark.parametrize("policy", ["Blocking", "Asynchronous"])
def test_interrupted_calls_leave_no_memory_behind(queue, policy):
    """Ctrl-C at a random time of a call; an event a call would be 2.5 KiB."""
    code = f"""
interrupts, before = 0, None
while interrupts < {10_000 if FULL else 3_000} + 500:
    if interrupts == 500 and before is None:
        before = resident()
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-6, 4e-5))
        for _ in range(4):
            kv.reshape_and_cache(*case)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupts += 1
queue.wait()
print(resident() - before)
"""
    handler = "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
    assert int(in_child(handler + code, policy, queue, timeout=600)) < 2048


def test_short_lived_queues_leave_no_memory_behind(queue):
    """Each has launches of its own, which took 31 KiB a queue."""
    code = f"""
from dpctl.memory import MemoryUSMDevice
from kvcache_dpex.runtime.launch import arrays

def on(queue, dtype, *shape):
    # No operation of dpnp, which keeps something for every queue.
    buffer = MemoryUSMDevice(8192, queue=queue)
    buffer.copy_from_host(bytes(8192))
    return arrays.tensor_module().usm_ndarray(shape, dtype=dtype, buffer=buffer)

for number in range({1600 if FULL else 400} + 100):
    own = dpctl.SyclQueue(queue.sycl_device)
    rows, cache, slots = on(own, "f4", 4, 2, 64), on(own, "f4", 2, 4, 2, 64), on(own, "i8", 4)
    kv.reshape_and_cache(rows, rows, cache, on(own, "f4", 2, 4, 2, 64), slots)
    if number == 99:
        before = resident()
print(resident() - before)
"""
    assert int(in_child(code, "Blocking", queue, timeout=600)) < 2048


def test_dropped_caches_are_given_back_without_another_call(queue):
    """dpctl #2359: after ``del`` and the end of the queue's work, their memory is free."""
    code = f"""
kv.reshape_and_cache(*case)
queue.wait()
before = resident()
large = arguments(queue, blocks={8192 if FULL else 1024})
queue.wait()
held = resident() - before
kv.reshape_and_cache(*large)
del large
queue.wait()
print(held, resident() - before)
"""
    held, left = map(int, in_child(code, "Asynchronous", queue).split())
    assert held > (1024 if FULL else 128) * 1000
    assert left < 4096


class Owner:
    """Something that a launch keeps alive; says when it goes."""

    def __init__(self, gone):
        self.gone = gone

    def __del__(self):
        self.gone.set()


class Blocker:
    """While a host task of an in-order queue releases it, what was submitted later has to wait."""

    def __init__(self, go_on):
        self.go_on = go_on

    def __del__(self):
        self.go_on.wait(30)


@pytest.fixture
def asynchronous_launch(queue):
    """A launch on an in-order queue that does not wait, and pointers for it."""
    import dpctl

    in_order = dpctl.SyclQueue(queue.sycl_device, property="in_order")
    memory = to_device(np.zeros(4096, "uint8"), in_order)
    module = store.load(scatter_gpu, slot="int64")
    prepared = launch.Launch(module, in_order, (0,) * 8, (1, 1), (1, 1), order.Asynchronous)
    yield prepared, (arrays.read(memory, "memory")[0],) * 5, memory
    in_order.wait()


def test_operands_live_as_long_as_the_kernel(asynchronous_launch):
    """dpctl #1395: held while the kernel has not ended; released after it, without another call."""
    run, pointers, _ = asynchronous_launch
    go_on, gone = threading.Event(), threading.Event()
    run.queue._submit_keep_args_alive((Blocker(go_on),), [])
    run(pointers, (Owner(gone),))
    gc.collect()
    assert not gone.wait(0.05)
    go_on.set()
    run.queue.wait()
    assert gone.wait(30)


def test_the_manager_of_dpnps_work_is_told_of_the_kernel(queue, monkeypatch):
    """dpnp waits for the events that its manager knows before it reads an array."""
    import dpctl

    told = []
    manager = SimpleNamespace(add_event_pair=lambda *events: told.append(events))
    monkeypatch.setattr(order, "order_managers", lambda: {queue: manager})
    module = store.load(scatter_gpu, slot="int64")
    run = launch.Launch(module, queue, (0,) * 8, (1, 1), (1, 1), order.Asynchronous)
    memory = to_device(np.zeros(4096, "uint8"), queue)
    run((arrays.read(memory, "memory")[0],) * 5, (memory,))
    queue.wait()
    ((released, kernel),) = told
    assert isinstance(released, dpctl.SyclEvent)
    assert isinstance(kernel, dpctl.SyclEvent)


def test_operands_live_as_long_as_the_kernel_on_an_out_of_order_queue(queue, monkeypatch):
    """dpctl #1395: the kernel waits for a copy of milliseconds that was submitted before it."""
    import dpctl

    monkeypatch.setattr(launch, "order_for", order.Asynchronous)
    own_queue = dpctl.SyclQueue(queue.sycl_device)
    source, target = (to_device(np.zeros(2**26, "uint8"), own_queue) for _ in range(2))
    run = launch.Launch(store.load(scatter_gpu, slot="int64"), own_queue, (0,) * 8, (1, 1), (1, 1))
    pointers = (arrays.read(source, "source")[0],) * 5
    complete = dpctl.event_status_type.complete
    for _ in range(3):
        gone = threading.Event()
        copied = own_queue.memcpy_async(target.usm_data, source.usm_data, source.nbytes)
        run(pointers, (Owner(gone),))
        while copied.execution_status != complete:
            assert not (gone.is_set() and copied.execution_status != complete)
        own_queue.wait()
        assert gone.wait(30)


def test_one_queue_does_not_hold_the_operands_of_another(asynchronous_launch, queue):
    run, pointers, _ = asynchronous_launch
    import dpctl

    other_queue = dpctl.SyclQueue(queue.sycl_device, property="in_order")
    memory = to_device(np.zeros(4096, "uint8"), other_queue)
    module = store.load(scatter_gpu, slot="int64")
    other = launch.Launch(module, other_queue, (0,) * 8, (1, 1), (1, 1), order.Asynchronous)
    go_on, gone, other_gone = threading.Event(), threading.Event(), threading.Event()
    run.queue._submit_keep_args_alive((Blocker(go_on),), [])
    run(pointers, (Owner(gone),))
    other((arrays.read(memory, "memory")[0],) * 5, (Owner(other_gone),))
    assert other_gone.wait(30)
    assert not gone.is_set()
    go_on.set()


def test_a_finalizer_may_launch(asynchronous_launch):
    """It runs when operands are released, whatever thread and lock that happens under."""
    run, pointers, _ = asynchronous_launch
    finished = threading.Event()

    class Launching:
        def __del__(self):
            run(pointers, ())
            finished.set()

    for _ in range(20):
        finished.clear()
        run(pointers, (Launching(),))
        assert finished.wait(30)


def test_an_interrupted_call_waits_for_its_kernel(asynchronous_launch, monkeypatch):
    """Its operands may be freed as soon as it has returned."""
    run, pointers, memory = asynchronous_launch
    go_on = threading.Event()

    def interrupt(event, owners):
        threading.Timer(0.1, go_on.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(run.order, "after", interrupt)
    run.queue._submit_keep_args_alive((Blocker(go_on),), [])
    with pytest.raises(KeyboardInterrupt):
        run(pointers, (memory,))
    assert go_on.is_set()


INTERRUPTED = """
def interrupted_at(number, call):
    # Run a call that is interrupted at an opcode of this package; whether it came to that one.
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if "/runtime/launch/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False

from kvcache_dpex.ops.operation import OPERATIONS
queue = dpctl.SyclQueue(queue.sycl_device, property={property!r}) if {property!r} else queue
ones, _, *caches, slots = arguments(queue)
twos = ones + 1
kv.reshape_and_cache(ones, ones, *caches, slots)
number = 1
while interrupted_at(number, lambda: kv.reshape_and_cache(twos, twos, *caches, slots)):
    number += 1
queue.wait()
kv.reshape_and_cache(ones, ones, *caches, slots)
rows = [dpnp.asnumpy(cache).reshape(-1, 8, 128) for cache in caches]
whole = [bool((each[:8] == 1).all() and not each[8:].any()) for each in rows]
print(number > 50, *whole, len(OPERATIONS["reshape_and_cache"].prepared))
"""


@pytest.mark.parametrize("property", [None, "in_order", "enable_profiling"])
@pytest.mark.parametrize("policy", ["Blocking", "Asynchronous"])
def test_an_interrupt_anywhere_ends_with_the_kernel(queue, policy, property):
    """Ctrl-C at each opcode of a call: no kernel runs on, and later calls work.

    In a process of its own, which a kernel that runs on in freed memory may end.
    """
    code = INTERRUPTED.replace("{property!r}", repr(property))
    assert in_child(code, policy, queue) == "True True True 1"


def test_a_kernel_goes_with_the_last_launch_that_uses_it(queue, monkeypatch):
    """Contexts come and go; what was built for one goes with it."""
    import dpctl

    monkeypatch.setattr(launch, "Kernel", launch.Kernel.__base__)  # the tests' own keeps each
    context = dpctl.SyclContext([queue.sycl_device])
    own_queue = dpctl.SyclQueue(context, queue.sycl_device)
    launches = launch.LaunchCache()
    for number in range(2):
        run = launch.Launch(store.load(scatter_gpu, slot="int64"), own_queue, (0,) * 8, (1, 1), (1, 1))
        launches.add((number,), own_queue, run)
    kernel = weakref.ref(launches[0,].kernel)
    assert launches[1,].kernel is kernel()
    launches.clear()
    del run
    gc.collect()
    assert kernel() is None


def test_launches_of_old_queues_make_room(queue):
    import dpctl

    launches = launch.LaunchCache()
    queues = [dpctl.SyclQueue(queue.sycl_device) for _ in range(launches.QUEUES + 3)]
    for number, each in enumerate(queues):
        launches.add((number, "a"), each, launch.nothing)
        launches.add((number, "b"), each, launch.nothing)
    kept = range(3, len(queues))
    assert list(launches) == [(number, letter) for number in kept for letter in "ab"]


def test_launches_of_many_geometries_make_room(queue):
    launches = launch.LaunchCache()
    for number in range(launches.LAUNCHES + 2):
        launches.add((number,), queue, launch.nothing)
    assert len(launches) == launches.LAUNCHES
    assert (1,) not in launches
    assert (2,) in launches
