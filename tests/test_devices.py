"""Choosing the device, and what is said where there is none."""

import itertools
import re
from types import SimpleNamespace

import pytest

from helpers import run_python
from kvcache_dpex.runtime.environment import devices, libraries


def fake(name, backend):
    return SimpleNamespace(
        filter_string=f"{backend}:{name}:0",
        is_gpu=name == "gpu",
        is_cpu=name == "cpu",
        backend=SimpleNamespace(name=backend),
    )


FAKES = {
    "Level Zero GPU": fake("gpu", "level_zero"),
    "OpenCL GPU": fake("gpu", "opencl"),
    "CPU": fake("cpu", "opencl"),
    "accelerator": fake("accelerator", "opencl"),
}


@pytest.fixture
def found(monkeypatch):
    """Lets dpctl find these devices and no others."""

    monkeypatch.setattr(devices, "default_device", devices.default_device.__wrapped__)

    def set_devices(names):
        listed = [FAKES[name] for name in names]
        monkeypatch.setattr(devices, "load_dpctl", lambda: SimpleNamespace(get_devices=lambda: listed))

    return set_devices


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_best_device(found, count):
    """A Level Zero GPU, else any GPU, else the CPU, whatever the order in which they are found."""
    for names in itertools.permutations(FAKES, count):
        found(names)
        assert devices.default_device() is FAKES[min(names, key=list(FAKES).index)]


def test_the_first_of_equal_devices(found, monkeypatch):
    second = fake("gpu", "level_zero")
    monkeypatch.setitem(FAKES, "another", second)
    found(["another", "Level Zero GPU"])
    assert devices.default_device() is second


def test_a_queue_for_each_way_to_name_a_device(queue):
    import dpctl
    import dpnp

    device = queue.sycl_device
    assert devices.queue_for() == queue
    assert devices.queue_for(device) == devices.queue_for(device.filter_string) == queue
    assert dpnp.empty(1, device=device).sycl_queue == queue
    own = dpctl.SyclQueue(device)
    assert own != queue
    assert devices.queue_for(own) is own


def test_names_that_are_no_device(queue):
    for wrong in (3, b"cpu", ["cpu"], devices):
        message = (
            "`device` must be None, a dpctl filter string, a dpctl.SyclDevice or a dpctl.SyclQueue, "
            f"got {type(wrong).__name__}"
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            devices.queue_for(wrong)
    for wrong in ("gpu:99", "toaster", ""):
        with pytest.raises(
            ValueError, match=rf"^`device` '{wrong}' names no device here; there is "
        ) as raised:
            devices.queue_for(wrong)
        assert queue.sycl_device.filter_string in str(raised.value)


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        (
            None,
            "for the CPU device: pip install intel-opencl-rt; for an Intel GPU, its Level Zero driver",
        ),
        (
            "/env/lib/libintelocl.so",
            "import kvcache_dpex before dpctl or dpnp and leave ONEAPI_DEVICE_SELECTOR and "
            "OCL_ICD_FILENAMES unset; `python -m kvcache_dpex doctor` shows what was found",
        ),
    ],
)
def test_no_device(found, monkeypatch, driver, remedy):
    """A43: what is said depends on whether the environment has the CPU driver."""
    found([])
    monkeypatch.setattr(libraries, "find", lambda name: driver)
    with pytest.raises(RuntimeError, match=f"^{re.escape('no SYCL device found; ' + remedy)}$"):
        devices.default_device()


@pytest.mark.parametrize(
    "call",
    ["kvcache_dpex.empty_cache(2, 4, 1, 8)", "kvcache_dpex.empty_cache(2, 4, 1, 8, device='cpu')"],
)
def test_no_device_in_a_fresh_process(call):
    """A43: a selector that matches nothing; importing works, the first use explains."""
    code = f"import kvcache_dpex; print('imported', flush=True); {call}"
    done = run_python(code, ONEAPI_DEVICE_SELECTOR="cuda:gpu")
    assert done.stdout == "imported\n"
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    start = "ValueError: `device` 'cpu' names no device here; there is none: "
    assert last.startswith(start if "device=" in call else "RuntimeError: no SYCL device found; ")
    assert "ONEAPI_DEVICE_SELECTOR" in last
