"""Fixtures of all tests: the best device's queue, and each way to run a kernel."""

import functools
import os

import pytest

import kvcache_dpex  # noqa: F401  (first, so that it finds the libraries of dpctl and dpnp)
from helpers import PlainLaunch, compiled, skip_record_on_gpu
from kvcache_dpex.ops.calls import launch_of
from kvcache_dpex.ops.operation import using
from kvcache_dpex.runtime.compile import compiler, elsewhere, store
from kvcache_dpex.runtime.environment import devices
from kvcache_dpex.runtime.launch import launch, order
from quantizing import force_kernel


@pytest.fixture(scope="session")
def queue():
    """The queue of the best device."""
    return devices.queue_for()


@pytest.fixture(params=["out of order", "in order", "profiling"])
def any_queue(request, queue):
    """The device's usual queue, an in-order one such as torch's streams are, and one that takes times."""
    import dpctl

    properties = {"in order": "in_order", "profiling": "enable_profiling"}
    if request.param in properties:
        return dpctl.SyclQueue(queue.sycl_device, property=properties[request.param])
    return queue


@pytest.fixture
def asynchronous(any_queue):
    """Launches that do not wait, by the kernels of a GPU, as on a GPU."""
    new = functools.partial(launch.Launch, order=order.Asynchronous)
    with using(launch=functools.partial(launch_of, new=new), variant="scatter_gpu"):
        yield
    any_queue.wait()


@pytest.fixture(params=["blocking", "asynchronous"])
def policy(request, any_queue):
    """Both ways to order a launch, on every device."""
    if request.param == "asynchronous":
        yield request.getfixturevalue("asynchronous")
    else:
        new = functools.partial(launch.Launch, order=order.Blocking)
        with using(launch=functools.partial(launch_of, new=new)):
            yield


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
    """Modules that a test compiles stay out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        tools = os.environ.get("KVCACHE_DPEX_IGC") or str(store.cache_folder() / "igc")
        patch.setenv("KVCACHE_DPEX_IGC", tools)
        patch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.delenv(elsewhere.VARIABLE, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def kernels_stay():
    """Each kernel is built once: a build takes up to a second, and the driver keeps megabytes of it."""
    built = []

    class StayingKernel(launch.Kernel):
        def __init__(self, kernel):
            super().__init__(kernel)
            built.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "Kernel", StayingKernel)
        yield


@functools.cache
def packaged(function, **types):
    """A kernel's packaged module, and no other."""
    module = store.packaged(store.signature(function, **types))
    assert module is not None, "the package is out of date: python -m kvcache_dpex kernels build"
    return module


def described(function, **types):
    """A kernel's module without its SPIR-V, which plain Python does not need."""
    return store.Module(*store.signature(function, **types), b"", "plain")


_built_from_source = {}
LOADERS = {"plain": described, "packaged": packaged, "compiled": compiled}
RUNNERS = ["plain", "packaged", *(["compiled"] if compiler.available() else [])]


@pytest.fixture(params=RUNNERS)
def runner(request, monkeypatch, queue):
    """Kernels as plain Python, as packaged SPIR-V and, where numba-dpex is installed, compiled now."""
    new = launch.Launch
    if request.param == "plain":
        if not queue.sycl_device.is_cpu:
            pytest.skip("plain Python reads the memory of the CPU device only")
        new = PlainLaunch
    if request.param == "compiled":
        monkeypatch.setattr(launch, "_built", _built_from_source)
    with using(launch=functools.partial(launch_of, load=LOADERS[request.param], new=new)):
        yield request.param


@pytest.fixture(params=["scatter_cpu", "scatter_gpu"])
def whole_rows(request, runner, queue):
    """Write whole rows with the CPU's kernel and with the GPU's, by each runner."""
    skip_record_on_gpu(request.param, queue)
    with using(variant=request.param):
        yield request.param


@pytest.fixture(params=["quantize_strided", "quantize_gpu", "quantize_cpu", "any"])
def kernel(request, queue):
    """Quantize with one kernel, on every device; the names of those that were launched.

    "any" is `quantize_strided` for rows of any stride, also where they are contiguous.
    """
    if "runner" in request.fixturenames:
        request.getfixturevalue("runner")
    with force_kernel(queue, request.param) as launched:
        yield launched
