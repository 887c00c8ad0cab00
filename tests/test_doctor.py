"""What doctor says of environments that cannot work, each of them built here, and of one that can."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest

import layouts
from helpers import ROOT, run_python
from kvcache_dpex import __version__
from kvcache_dpex.__main__ import main
from kvcache_dpex.commands import check, doctor
from kvcache_dpex.runtime.compile import compiler, elsewhere, package, store
from kvcache_dpex.runtime.environment import compatibility, devices, gpu, libraries

SERIES = {7: "2024.2.*", 8: "2025.*", 9: "2026.*"}
LINKED = libraries.linked_sycl_version()


@pytest.fixture
def environment(tmp_path):
    """A working environment of the test's own, to be broken."""
    return layouts.whole(tmp_path / "environment")


def problems(site, *, package=ROOT, **variables):
    """What doctor finds; its exit status and its last line tell whether that is nothing."""
    done = layouts.run([site], "-m", "kvcache_dpex", "doctor", package=package, **variables)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    found = [line.partition(": ")[2] for line in lines if line.startswith("problem: ")]
    assert done.returncode == (1 if found else 0)
    assert lines[-1].startswith(
        "problem: " if found else "no problem found; the default device is opencl:cpu:0"
    )
    return found


def test_an_environment_that_works(environment):
    assert problems(environment) == []


def test_no_dpctl(environment):
    for path in environment.glob("dpctl*"):
        shutil.rmtree(path)
    assert problems(environment) == ["dpctl is not installed: pip install dpctl"]


def test_no_dpnp(environment):
    for path in environment.glob("dpnp*"):
        shutil.rmtree(path)
    assert problems(environment) == ["dpnp is not installed: pip install dpnp"]


def test_no_sycl_runtime(environment):
    for file in environment.glob("lib/libsycl.so*"):
        file.unlink()
    name = f"libsycl.so.{LINKED}"
    assert problems(environment) == [
        f"kvcache_dpex needs dpctl and its SYCL runtime ({name}: cannot open shared object file: No such "
        f"file or directory): pip install 'intel-sycl-rt=={SERIES[LINKED]}'"
    ]


def test_no_mkl(environment):
    for file in environment.glob("lib/libmkl_sycl_blas.so*"):
        file.unlink()
    (found,) = problems(environment)
    assert found.startswith("import dpnp fails (ImportError: libmkl_sycl_blas.so.")
    assert found.endswith(f": pip install 'onemkl-sycl-blas=={SERIES[LINKED]}'")


def test_a_dpnp_that_fails(environment):
    (environment / "dpnp/__init__.py").unlink()
    (environment / "dpnp/__init__.py").write_text("raise ValueError('numpy.dtype size changed')")
    dpctl, dpnp = compatibility.version("dpctl"), compatibility.version("dpnp")
    assert problems(environment) == [
        "import dpnp fails (ValueError: numpy.dtype size changed): pip install --force-reinstall --no-deps "
        f"dpctl=={dpctl} dpnp=={dpnp}"
    ]


def test_a_dpnp_of_another_dpctl(environment):
    for path in environment.glob("dpnp-*.dist-info"):
        shutil.rmtree(path)
    layouts.distribution(environment, "dpnp", "0.18.1")
    dpctl = compatibility.version("dpctl")
    dpnp = compatibility.version("dpnp")
    assert problems(environment) == [
        f"dpnp 0.18.1 was not built with dpctl {dpctl}: pip install dpnp=={dpnp}"
    ]


def test_a_torch_of_another_runtime(environment):
    """Two SYCL runtimes in one process crash it; told from what is installed, before any is loaded."""
    version, libsycl = ("2.12.0+xpu", 8) if LINKED == 9 else ("2.13.0+xpu", 9)
    layouts.distribution(environment, "torch", version)
    (found,) = problems(environment)
    assert found.startswith(f"torch {version} brings libsycl.so.{libsycl}, but dpctl ")
    assert found.endswith(compatibility.release_of(version).pip_command)


def test_no_opencl_driver(environment):
    for path in environment.glob("intel_opencl_rt-*.dist-info"):
        shutil.rmtree(path)
    if LINKED == 7:  # whose libOpenCL.so.1 comes with the driver
        pytest.skip("dpctl of the 2024 runtime does not load without it")
    (found,) = problems(environment)
    assert found.startswith(
        "no SYCL device found: the CPU device needs an OpenCL driver: pip install "
        f"'intel-opencl-rt=={SERIES[LINKED]}'; no Intel GPU is visible"
    )


def test_an_opencl_driver_that_is_damaged(environment):
    for path in environment.glob("lib/libintelocl.so"):
        path.unlink()
        path.write_bytes(b"")
    (found,) = problems(environment)
    assert found.endswith(f"pip install --force-reinstall --no-deps 'intel-opencl-rt=={SERIES[LINKED]}'")


def test_an_opencl_driver_of_the_user_that_is_not_there(environment):
    assert problems(environment, OCL_ICD_FILENAMES="/nowhere/driver.so") == [
        "no SYCL device found: OCL_ICD_FILENAMES=/nowhere/driver.so names no OpenCL driver that works; "
        "unset it"
    ]


def test_a_selector_that_hides_every_device(environment):
    """ipex-llm #12844"""
    assert problems(environment, ONEAPI_DEVICE_SELECTOR="level_zero:0") == [
        "no SYCL device found: ONEAPI_DEVICE_SELECTOR=level_zero:0 hides every device; unset it"
    ]


def test_a_second_runtime(environment):
    """Loaded by something else, such as a plugin that Python starts with."""
    shutil.copy(libraries.find("libsycl"), environment / "libsycl.so.8.0")
    code = (
        f"import ctypes, sys; ctypes.CDLL({str(environment / 'libsycl.so.8.0')!r})\n"
        "from kvcache_dpex.__main__ import main; sys.exit(main(['doctor']))"
    )
    done = layouts.run([environment], "-c", code)
    assert done.returncode == 1
    assert (
        f"problem: this process has loaded SYCL runtime libsycl.so.8 beside libsycl.so.{LINKED}"
        in done.stdout
    )


@pytest.fixture
def copy(tmp_path):
    """A copy of the package that a test may change."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvcache_dpex", tmp_path / "copy/kvcache_dpex", ignore=ignored)
    return tmp_path / "copy"


def test_no_kernels(environment, copy):
    """pyinstaller #6865: a bundle that left them out."""
    for file in (copy / "kvcache_dpex/kernels").glob("*.py"):
        if "\nTYPES = " in file.read_text():
            file.unlink()
    message = f"no kernel in {copy}/kvcache_dpex/kernels: {store.REINSTALL}"
    assert message in problems(environment, package=copy)


def test_kernels_that_nothing_compiles(environment, copy):
    """The layout has no numba-dpex, and the packaged module is of another source."""
    file = copy / "kvcache_dpex/kernels/scatter_strided.py"
    file.write_text(file.read_text().replace("if 0 <= slot < num_slots:", "if 0 < slot < num_slots:"))
    (found,) = problems(environment, package=copy)
    assert re.fullmatch(
        r"\d+ of \d+ kernels are not packaged with this source, and compiling them needs numba-dpex: "
        + re.escape(elsewhere.REMEDY),
        found,
    )


@pytest.mark.parametrize("python", [sys.executable, "/no/python"])
def test_kernels_that_another_python_compiles(monkeypatch, python):
    """A compiler that the variable names is no less than numba-dpex here; one that is not there is told."""
    monkeypatch.setattr(compiler, "available", lambda: False)
    monkeypatch.setattr(store, "packaged", lambda wanted: None)
    monkeypatch.setenv(elsewhere.VARIABLE, python)
    report = {"compiler": False, "notes": [], "problems": []}
    doctor._look_for_kernels(report)
    if python == sys.executable:
        assert report["problems"] == []
    else:
        (problem,) = report["problems"]
        assert problem.startswith(f"{elsewhere.VARIABLE} must name a Python")


def test_a_damaged_kernel(environment, copy):
    name = next(iter(store.manifest()["modules"]))
    (copy / f"kvcache_dpex/spirv/{name}.spv").write_bytes(b"")
    (found,) = problems(environment, package=copy)
    assert found.startswith(f"the kernels cannot be read ({name}.spv of the package is damaged")


def test_a_compiler_that_fails(environment):
    (environment / "numba_dpex").mkdir()
    (environment / "numba_dpex/__init__.py").write_text("raise ImportError('no llvmlite')")
    layouts.distribution(environment, "numba-dpex", "0.23.0")
    assert problems(environment) == [
        "import numba_dpex fails (ImportError: no llvmlite): pip install 'kvcache_dpex[jit]'"
    ]


@pytest.fixture
def examine(monkeypatch, queue):
    """What doctor finds in this process, which a test has changed."""
    if queue.sycl_device.is_gpu:
        pytest.skip("there is a GPU")
    for name in gpu.SELECTORS:
        monkeypatch.delenv(name, raising=False)
    return doctor.examine


@pytest.mark.parametrize("selector", [None, "opencl:cpu"])
def test_an_intel_gpu_that_sycl_does_not_see(examine, monkeypatch, selector):
    """It is a problem, unless the user selected another device; test_devices.py has each reason."""
    monkeypatch.setattr(gpu, "nodes", lambda: ["/dev/dri/renderD128"])
    monkeypatch.setattr(gpu, "absence", lambda: "the reason")
    if selector:
        monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", selector)
    report = examine()
    assert (report["problems"], report["notes"]) == (
        ([], ["the reason"]) if selector else (["the reason"], [])
    )


def test_a_selector_that_hides_every_device_of_a_machine_with_a_gpu(examine, monkeypatch):
    """A selection that leaves no device is no choice of another one."""
    monkeypatch.setattr(gpu, "nodes", lambda: ["/dev/dri/renderD128"])
    monkeypatch.setattr(gpu, "absence", lambda: "the reason")
    monkeypatch.setattr(devices.load_dpctl(), "get_devices", list)
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "cuda:*")
    assert "the reason" in examine()["problems"]


def test_a_machine_without_an_intel_gpu(examine, monkeypatch):
    """It is told, and is no fault."""
    monkeypatch.setattr(gpu, "nodes", list)
    report = examine()
    assert report["problems"] == []
    assert report["notes"] == [gpu.absence()]


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (RuntimeError("refused"), "a write on {} fails (RuntimeError: refused)"),
        ([("right", 0), ("wrong", 3)], "a write on {} is wrong: python -m kvcache_dpex check --device {}"),
    ],
    ids=["fails", "wrong"],
)
def test_a_write_that_does_not_work(examine, monkeypatch, queue, outcome, problem):
    def plain_write(queue):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(check, "plain_write", plain_write)
    device = queue.sycl_device.filter_string
    assert examine()["problems"] == [problem.format(device, device)]


def test_what_a_device_is_said_to_have():
    """Every value of its own, so that none can stand for another."""
    device = SimpleNamespace(
        filter_string="level_zero:gpu:0",
        name="a GPU",
        driver_version="1.2",
        global_mem_size=3,
        max_mem_alloc_size=2,
        max_work_group_size=1024,
        has_aspect_fp16=True,
        has_aspect_fp64=False,
    )
    assert list(doctor._describe(device).values()) == list(vars(device).values())


def test_sizes_of_a_device_are_told_apart(capsys):
    device = {"device": "d", "name": "n", "driver": "1", "work_group": 64, "fp16": True, "fp64": False}
    doctor._print_devices([{**device, "memory": 3 * 2**30, "largest_allocation": 2**30}])
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *("d", "n", "1", "3.0", "GiB", "1.0", "GiB", "64", "yes", "no")
    ]


def test_the_opencl_driver_of_the_user_is_reported(examine, monkeypatch):
    monkeypatch.setenv("OCL_ICD_FILENAMES", "/their/driver.so")
    assert examine()["opencl_driver"] == "/their/driver.so"


def test_another_python_compiles(examine, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "available", lambda: False)
    installed = tmp_path / "compiler" / "bin" / "python"
    installed.parent.mkdir(parents=True)
    installed.symlink_to(sys.executable)
    for variable, python in [("", installed), (sys.executable, sys.executable), ("/no/python", None)]:
        monkeypatch.setenv(elsewhere.VARIABLE, variable)
        assert examine()["compiler_python"] == (str(python) if python else None)
    monkeypatch.setenv(elsewhere.VARIABLE, sys.executable)
    main(["doctor"])
    assert capsys.readouterr().out.splitlines()[0].endswith(f": kernels compile in {sys.executable}")


def test_the_report(capsys, queue):
    """The text and the JSON of the environment of these tests."""
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    kind = "kernels compile here" if compiler.available() else "packaged SPIR-V, no compiler"
    if elsewhere.named():
        kind = f"kernels compile in {re.escape(elsewhere.named())}"
    assert re.fullmatch(rf"kvcache_dpex {re.escape(__version__)} on Python 3\.\S+: {kind}", lines[0])
    assert f"dpctl {compatibility.version('dpctl')}, dpnp {compatibility.version('dpnp')}, " in lines[1]
    assert lines[2].startswith(f"SYCL runtime libsycl.so.{LINKED}, OpenCL CPU driver /")
    total = len(package.catalogue())
    assert f"{total} of {total} kernels packaged with this source, cache {store.cache_folder()}" in lines
    assert lines[-1] == f"no problem found; the default device is {queue.sycl_device.filter_string}"
    assert text.isascii()

    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"] == {"packaged": total, "total": total, "cache": str(store.cache_folder())}
    assert report["devices"][0]["device"] == report["default_device"]
    assert report["packages"]["numba-dpex"] == compatibility.version("numba-dpex")


def test_the_best_device_comes_first(monkeypatch):
    names = ("opencl:cpu:0", "level_zero:gpu:0", "opencl:gpu:0")
    found = [
        SimpleNamespace(
            **dict.fromkeys(
                ("global_mem_size", "max_mem_alloc_size", "max_work_group_size"),
                2**30,
            ),
            filter_string=name,
            name=name,
            driver_version="1",
            has_aspect_fp16=True,
            has_aspect_fp64=False,
            is_gpu="gpu" in name,
            is_cpu="cpu" in name,
            backend=SimpleNamespace(name=name.partition(":")[0]),
        )
        for name in names
    ]
    monkeypatch.setattr(devices, "load_dpctl", lambda: SimpleNamespace(get_devices=lambda: found))
    monkeypatch.setattr(devices, "default_device", lambda: found[1])
    monkeypatch.setattr(devices, "queue_for", lambda: None)
    monkeypatch.setattr(check, "plain_write", lambda queue: [])
    report = doctor.examine()
    assert [each["device"] for each in report["devices"]] == [names[1], names[2], names[0]]
    assert report["notes"] == report["problems"] == []


def test_every_device_is_found_by_grep():
    """A pipe has no width: its lines are whole."""
    done = run_python("", arguments=["-m", "kvcache_dpex", "doctor"], COLUMNS="40")
    assert done.returncode == 0, done.stdout
    assert any(line.startswith("opencl:cpu:0  ") for line in done.stdout.splitlines())
