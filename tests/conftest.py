"""Fixtures of all tests: the best device's queue, and each way to run a kernel."""

import functools
import os
from types import SimpleNamespace

import pytest

import kvcache_dpex  # noqa: F401  (first, so that it finds the libraries of dpctl and dpnp)
from helpers import PlainLaunch, compiled, skip_record_on_gpu
from kvcache_dpex.ops import dequantize, quantize, write
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
def asynchronous(monkeypatch, any_queue):
    """Launches that do not wait, by the kernels of a GPU, as on a GPU."""
    chosen = write._kernel_of(SimpleNamespace(sycl_device=SimpleNamespace(is_cpu=False)))
    monkeypatch.setattr(write, "_kernel_of", lambda queue: chosen)
    monkeypatch.setattr(write, "_launches", launch.LaunchCache())
    monkeypatch.setattr(launch, "order_for", order.Asynchronous)
    yield
    any_queue.wait()


@pytest.fixture(params=["blocking", "asynchronous"])
def policy(request, monkeypatch, any_queue):
    """Both ways to order a launch, on every device."""
    if request.param == "asynchronous":
        return request.getfixturevalue("asynchronous")
    monkeypatch.setattr(write, "_launches", launch.LaunchCache())
    monkeypatch.setattr(launch, "order_for", order.Blocking)
    return None


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
    """Modules that a test compiles stay out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        tools = os.environ.get("KVCACHE_DPEX_IGC") or str(store.cache_folder() / "igc")
        patch.setenv("KVCACHE_DPEX_IGC", tools)
        patch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.delenv(elsewhere.VARIABLE, raising=False)
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
    monkeypatch.setattr(store, "load", LOADERS[request.param])
    for verb in (write, quantize, dequantize):
        monkeypatch.setattr(verb, "_launches", launch.LaunchCache())
    if request.param == "plain":
        if not queue.sycl_device.is_cpu:
            pytest.skip("plain Python reads the memory of the CPU device only")
        monkeypatch.setattr(launch, "Launch", PlainLaunch)
    if request.param == "compiled":
        monkeypatch.setattr(launch, "_built", _built_from_source)
    return request.param


@pytest.fixture(params=["scatter_words", "scatter"])
def whole_rows(request, runner, monkeypatch, queue):
    """Write whole rows with the CPU's kernel and with the GPU's, by each runner."""
    skip_record_on_gpu(request.param, queue)
    device = SimpleNamespace(is_cpu=request.param == "scatter_words")
    chosen = write._kernel_of(SimpleNamespace(sycl_device=device))
    monkeypatch.setattr(write, "_kernel_of", lambda queue: chosen)
    return request.param


@pytest.fixture(params=["quantize_rows", "quantize_lanes", "quantize_spread", "quantize_any"])
def kernel(request, monkeypatch, queue):
    """Quantize with one kernel, on every device; the names of those that were launched."""
    if "runner" in request.fixturenames:
        request.getfixturevalue("runner")
    return force_kernel(monkeypatch, queue, request.param)
