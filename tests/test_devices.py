"""Choosing the device, and what is said where there is none."""

import itertools
import re
from types import SimpleNamespace

import pytest

from helpers import run_python
from kvcache_dpex.runtime.environment import compatibility, devices, gpu, libraries


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


NO_DRIVER_MESSAGE = (
    "the CPU device needs an OpenCL driver: pip install 'intel-opencl-rt==2024.2.*'; no Intel GPU"
)


@pytest.fixture
def nothing(found, monkeypatch):
    """No device, a 2024 runtime, its driver, and no variable; a test changes one of them."""
    found([])
    for name in (*gpu.SELECTORS, "OCL_ICD_FILENAMES", libraries._OWN_DRIVER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(libraries, "linked_sycl_version", lambda: 7)
    monkeypatch.setattr(libraries, "find", lambda stem: f"/env/lib/{stem}.so")
    monkeypatch.setattr(compatibility, "version", {"intel-opencl-rt": "2024.2.2", "dpctl": "0.17.0"}.get)
    monkeypatch.setattr(gpu, "absence", lambda: "no Intel GPU")
    return monkeypatch


def reason():
    with pytest.raises(RuntimeError, match=r"^no SYCL device found: ") as raised:
        devices.default_device()
    return str(raised.value).partition(": ")[2]


@pytest.mark.parametrize("variable", ["ONEAPI_DEVICE_SELECTOR", "SYCL_DEVICE_ALLOWLIST", "ZE_AFFINITY_MASK"])
def test_a_selector_that_hides_every_device(nothing, variable):
    """ipex-llm #12844: the variable is named, not a driver that is installed."""
    nothing.setenv(variable, "level_zero:0")
    assert reason() == f"{variable}=level_zero:0 hides every device; unset it"


def test_no_opencl_driver(nothing):
    """dpctl #914: in the release that works with the runtime."""
    nothing.setattr(libraries, "find", lambda stem: None)
    assert reason() == NO_DRIVER_MESSAGE


def test_an_opencl_driver_of_the_user_that_does_not_work(nothing):
    nothing.setenv("OCL_ICD_FILENAMES", "/their/driver.so")
    assert reason() == "OCL_ICD_FILENAMES=/their/driver.so names no OpenCL driver that works; unset it"


def test_an_opencl_driver_that_this_package_named(nothing):
    """There is nothing for the user to unset."""
    for name in ("OCL_ICD_FILENAMES", libraries._OWN_DRIVER):
        nothing.setenv(name, "/env/lib/libintelocl.so")
    assert reason().startswith(
        "the OpenCL driver /env/lib/libintelocl.so was not loaded; import kvcache_dpex"
    )


def test_an_opencl_driver_of_another_runtime(nothing):
    nothing.setattr(compatibility, "version", {"intel-opencl-rt": "2026.2.0", "dpctl": "0.17.0"}.get)
    assert reason() == (
        "the OpenCL driver intel-opencl-rt 2026.2.0 does not work with the SYCL runtime of dpctl 0.17.0: "
        "pip install 'intel-opencl-rt==2024.2.*'"
    )


def test_an_opencl_driver_that_was_not_loaded(nothing):
    assert reason() == (
        "the OpenCL driver /env/lib/libintelocl.so was not loaded; import kvcache_dpex before anything asks "
        "SYCL for devices, or reinstall the driver: pip install --force-reinstall --no-deps "
        "'intel-opencl-rt==2024.2.*'"
    )


@pytest.mark.parametrize("device", ["gpu", "level_zero:gpu:0", "cpu:7"])
def test_a_device_that_is_not_there(monkeypatch, queue, device):
    """The devices that are, and why no Intel GPU is; one traceback, not two."""
    if queue.sycl_device.is_gpu:
        pytest.skip("there is a GPU")
    monkeypatch.setattr(gpu, "absence", lambda: "no Intel GPU is visible: get one")
    with pytest.raises(ValueError, match="names no device here") as raised:
        devices.queue_for(device)
    assert str(raised.value) == (
        f"`device` {device!r} names no device here; there is {queue.sycl_device.filter_string}; "
        "no Intel GPU is visible: get one"
    )
    assert raised.value.__context__ is None


@pytest.mark.parametrize(
    "call",
    ["kvcache_dpex.empty_cache(2, 4, 1, 8)", "kvcache_dpex.empty_cache(2, 4, 1, 8, device='cpu')"],
)
def test_no_device_in_a_fresh_process(call):
    """dpctl #1406: importing works, the first use explains."""
    code = f"import kvcache_dpex; print('imported', flush=True); {call}"
    done = run_python(code, ONEAPI_DEVICE_SELECTOR="cuda:gpu")
    assert done.stdout == "imported\n"
    assert done.returncode == 1
    start = (
        "ValueError: `device` 'cpu' names no device here; there is none: "
        if "device=" in call
        else "RuntimeError: no SYCL device found: "
    )
    last = f"{start}ONEAPI_DEVICE_SELECTOR=cuda:gpu hides every device; unset it"
    assert done.stderr.strip().splitlines()[-1] == last


def test_a_second_runtime_is_refused_before_dpctl_is_used(monkeypatch):
    monkeypatch.setattr(libraries, "loaded_sycl_versions", lambda: {7, 9})
    with pytest.raises(RuntimeError, match="two SYCL runtimes in one process crash it"):
        devices.load_dpctl.__wrapped__()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of the test's own: its render nodes by PCI vendor, and which of them this user may open."""
    real = gpu.Path

    def path(first, *parts):
        return real(tmp_path, str(first).lstrip("/"), *parts) if str(first).startswith("/") else real(first)

    def make(vendors=(), *, closed=(), absent=(), wsl=False):
        for number, vendor in enumerate(vendors, 128):
            node = tmp_path / f"sys/class/drm/renderD{number}/device"
            node.mkdir(parents=True)
            (node / "vendor").write_text(f"{vendor}\n")
            if number not in absent:
                (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
                (tmp_path / f"dev/dri/renderD{number}").touch()
        if wsl:
            (tmp_path / "dev").mkdir(exist_ok=True)
            (tmp_path / "dev/dxg").touch()
        names = {f"renderD{number}" for number in closed}
        monkeypatch.setattr(gpu.os, "access", lambda node, mode: real(node).name not in names)

    for name in gpu.SELECTORS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu, "Path", path)
    return make


def test_a_selector_that_is_empty_hides_nothing(machine, monkeypatch):
    machine()
    for name in gpu.SELECTORS:
        monkeypatch.setenv(name, "")
    assert gpu.selectors() == ""
    monkeypatch.setenv(gpu.SELECTORS[0], "opencl:cpu")
    assert gpu.selectors() == f"{gpu.SELECTORS[0]}=opencl:cpu"


def test_render_nodes_of_intel_gpus(machine, tmp_path):
    machine(["0x10de", "0x8086", "0x8086"])
    (tmp_path / "sys/class/drm/renderD131/device").mkdir(parents=True)  # a virtual device has no vendor
    assert [node.name for node in gpu.nodes()] == ["renderD129", "renderD130"]


LEVEL_ZERO = (
    "sudo apt install libze-intel-gpu1 libze1 (Debian 13, Ubuntu 24.10 and later), or your distribution's "
    "intel-level-zero-gpu and level-zero"
)


def test_no_permission_to_open_a_node(machine, tmp_path):
    machine(["0x8086", "0x8086"], closed=[129])
    assert gpu.absence() == (
        f"no Intel GPU is visible: this user may not open {tmp_path}/dev/dri/renderD129: "
        "sudo usermod -aG render $USER, then log in again"
    )


def test_a_node_that_may_only_be_read(machine, tmp_path, monkeypatch):
    """A driver opens it for writing too."""
    machine(["0x8086"])
    monkeypatch.setattr(gpu.os, "access", lambda node, mode: not mode & gpu.os.W_OK)
    assert f"this user may not open {tmp_path}/dev/dri/renderD128" in gpu.absence()


def test_no_level_zero_driver(machine, tmp_path):
    machine(["0x8086"])
    assert gpu.absence() == (
        f"no Intel GPU is visible: {tmp_path}/dev/dri/renderD128 is one, but its Level Zero driver is "
        f"missing: {LEVEL_ZERO}"
    )


def test_a_container_without_the_node(machine, tmp_path):
    machine(["0x8086"], absent=[128])
    assert gpu.absence() == (
        f"no Intel GPU is visible: {tmp_path}/dev/dri/renderD128 does not exist here: start the container "
        "with --device /dev/dri"
    )


def test_wsl2(machine):
    machine(wsl=True)
    assert gpu.absence() == (
        "no Intel GPU is visible: this is WSL2, which reaches the GPU through /dev/dxg: install Intel's "
        f"graphics driver on Windows and the Level Zero driver in Linux, {LEVEL_ZERO}"
    )


def test_a_machine_without_an_intel_gpu(machine):
    machine(["0x10de"])
    assert gpu.absence() == (
        "no Intel GPU is visible: the Linux kernel shows none in /sys/class/drm; on a machine that has one, "
        f"install its kernel driver (i915 or xe) and its Level Zero driver, {LEVEL_ZERO}; give a container "
        "--device /dev/dri"
    )


def test_a_selector_that_may_hide_the_gpu(machine, monkeypatch):
    machine()
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "opencl:cpu")
    assert gpu.absence().startswith(
        "no Intel GPU is visible (ONEAPI_DEVICE_SELECTOR=opencl:cpu is set and can hide a GPU: unset it): "
    )
