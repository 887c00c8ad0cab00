"""Fixtures of all tests: the best device's queue, and each way to run a kernel."""

import functools
import os

import pytest

import kvcache_dpex  # noqa: F401  (first, so that it finds the libraries of dpctl and dpnp)
from helpers import PlainLaunch, compiled, skip_record_on_gpu
from kvcache_dpex.ops import dequantize, plan, quantize, write
from kvcache_dpex.runtime.compile import compiler, store
from kvcache_dpex.runtime.environment import devices
from kvcache_dpex.runtime.launch import launch
from quantizing import force_kernel


@pytest.fixture(scope="session")
def queue():
    """The queue of the best device."""
    return devices.queue_for()


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
    """Modules that a test compiles stay out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        tools = os.environ.get("KVCACHE_DPEX_IGC") or str(store.cache_folder() / "igc")
        patch.setenv("KVCACHE_DPEX_IGC", tools)
        patch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path_factory.mktemp("modules")))
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
        monkeypatch.setattr(verb, "_launches", {})
    if request.param == "plain":
        if not queue.sycl_device.is_cpu:
            pytest.skip("plain Python reads the memory of the CPU device only")
        monkeypatch.setattr(launch, "Launch", PlainLaunch)
    if request.param == "compiled":
        monkeypatch.setattr(launch, "_built", _built_from_source)
    return request.param


@pytest.fixture(params=["scatter_cpu", "scatter_gpu"])
def whole_rows(request, runner, monkeypatch, queue):
    """Write whole rows with the CPU's kernel and with the GPU's, by each runner."""
    skip_record_on_gpu(request.param, queue)
    with plan.prefer(request.param):
        yield request.param


@pytest.fixture(params=["quantize_strided", "quantize_gpu", "quantize_cpu", "any"])
def kernel(request, monkeypatch, queue):
    """Quantize with one kernel, on every device; the names of those that were launched.

    "any" is `quantize_strided` for rows of any stride, also where they are contiguous.
    """
    if "runner" in request.fixturenames:
        request.getfixturevalue("runner")
    with force_kernel(monkeypatch, queue, request.param) as launched:
        yield launched
