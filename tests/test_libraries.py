"""Loading the SYCL, OpenCL and MKL libraries; two SYCL runtimes in one process are refused."""

import os
import re
import struct
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import ROOT, output_of
from kvcache_dpex.runtime.environment import bundle, libraries, watch


@pytest.mark.parametrize(
    "order",
    [
        "import kvcache_dpex, dpctl, dpnp",
        "import kvcache_dpex, dpnp, dpctl",
        "import dpctl, dpnp, kvcache_dpex",
        "import dpnp, kvcache_dpex, dpctl",
    ],
)
def test_each_order_of_imports(order):
    """The last two are what import sorters make of it; `kvcache_dpex.pth` is installed with the package."""
    code = f"{order}; print(int(dpnp.ones(3).sum()), len(dpctl.get_devices()) > 0)"
    assert output_of(code, LD_LIBRARY_PATH=None, OCL_ICD_FILENAMES=None) == "3 True"


def test_a_dpctl_that_was_imported_first_still_finds_the_opencl_driver():
    """SYCL looks for drivers when it is first asked for devices, which may be after the import."""
    driver = libraries.find("libintelocl")
    if driver is None:
        pytest.skip("there is no OpenCL driver of pip")
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'kvcache_dpex' not in str(f)]\n"
        "import dpctl, os, kvcache_dpex; print(os.environ.get('OCL_ICD_FILENAMES'))"
    )
    variables = {
        "OCL_ICD_FILENAMES": None,
        libraries._OWN_DRIVER: None,
        "LD_LIBRARY_PATH": str(driver.parent),
    }
    assert output_of(code, **variables) == str(driver)


@pytest.fixture
def variables(monkeypatch):
    """Neither the user nor a parent process names a driver; what the test sets is undone."""
    for name in ("OCL_ICD_FILENAMES", libraries._OWN_DRIVER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return os.environ


def driver_at(monkeypatch, path):
    found = {"libintelocl": path and Path(path)}
    monkeypatch.setattr(libraries, "find", found.get)


def test_the_opencl_driver_of_the_environment(variables, monkeypatch):
    driver_at(monkeypatch, None)
    libraries.set_opencl_driver()
    assert "OCL_ICD_FILENAMES" not in variables
    for path in ("/env/lib/libintelocl.so", "/another/lib/libintelocl.so"):
        driver_at(monkeypatch, path)
        libraries.set_opencl_driver()
        assert variables["OCL_ICD_FILENAMES"] == path
        assert libraries.is_own_driver()


def test_a_driver_of_the_parents_environment_is_dropped_where_there_is_none(variables, monkeypatch):
    variables["OCL_ICD_FILENAMES"] = variables[libraries._OWN_DRIVER] = "/parent/libintelocl.so"
    driver_at(monkeypatch, None)
    libraries.set_opencl_driver()
    assert not {"OCL_ICD_FILENAMES", libraries._OWN_DRIVER} & set(variables)


@pytest.mark.parametrize("value", ["/their/driver.so", ""])
def test_the_users_opencl_driver_stays(variables, monkeypatch, value):
    variables["OCL_ICD_FILENAMES"] = value
    driver_at(monkeypatch, "/env/lib/libintelocl.so")
    libraries.set_opencl_driver()
    assert variables["OCL_ICD_FILENAMES"] == value
    assert not libraries.is_own_driver()


CPP = ["libstdc++.so.6", "libgcc_s.so.1"]


@pytest.mark.parametrize(
    ("linked", "here", "expected"),
    [
        (7, "libtbb.so.12 libsycl.so.7", [*CPP, "libtbb.so.12", "libsycl.so.7"]),
        (7, "libtbb.so.12 libsycl.so.9", [*CPP, "libtbb.so.12"]),
        (7, "", None),
        (9, "libtbb.so.12 libsycl.so.9", None),
        (9, "elsewhere/libtbb.so.12 libsycl.so.9", [*CPP, "libtbb.so.12"]),
        (None, "libtbb.so.12 libsycl.so.7", None),
    ],
    ids=["2024", "another runtime", "nothing", "wheels that look there", "elsewhere", "no dpctl"],
)
def test_preload(tmp_path, monkeypatch, linked, here, expected):
    """In the order of their needs, only what the linker would not find, and never a second runtime."""
    lib = tmp_path / "lib"
    files = [lib / name for name in here.split()]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    found = {file.name.partition(".")[0]: file for file in files}
    loaded = []
    monkeypatch.setattr(libraries, "find", found.get)
    monkeypatch.setattr(libraries, "linked_sycl_version", lambda: linked)
    monkeypatch.setattr(libraries, "dpctl_folder", lambda: lib / "python3/site-packages/dpctl")
    monkeypatch.setattr(libraries.bundle, "load", lambda *wanted: loaded.append(wanted) or True)
    libraries.preload(tuple(libraries._CORE))
    libraries.preload(tuple(libraries._CORE))
    folder = str(lib / "elsewhere") if "elsewhere" in here else str(lib)
    assert loaded == ([] if expected is None else [(tuple(expected), (folder,))])


def test_one_that_cannot_be_loaded_does_not_keep_the_others_out(monkeypatch):
    tried = []
    monkeypatch.setattr(
        libraries.bundle, "load", lambda names, folders: tried.append(list(names)) or "bad" not in names
    )
    libraries._load_once(("first", "bad", "last"), ("/lib",))
    assert tried == [["first", "bad", "last"], ["first"], ["first", "bad"], ["first", "last"]]


@pytest.mark.parametrize(("module", "groups"), [("dpctl", 1), ("dpnp", 2), ("numba_dpex", 2)])
def test_what_each_module_needs(variables, monkeypatch, module, groups):
    driver_at(monkeypatch, None)
    wanted = []
    monkeypatch.setattr(libraries, "preload", wanted.append)
    libraries.prepare(module)
    core, mkl = tuple(libraries._CORE), tuple(libraries._MKL)
    assert wanted == [core, (*core, *mkl)][:groups]


def test_a_bundle_loads_libraries_that_only_they_see():
    """The C library's own, by name, into a scope where nobody else looks."""
    names = ["libanl.so.1", "libthread_db.so.1", "libnone.so.0"]
    code = (
        "import ctypes; from kvcache_dpex.runtime.environment import bundle; from pathlib import Path\n"
        "bundle.load({names}, ['/']); maps = Path('/proc/self/maps').read_text()\n"
        "print('libthread_db.so.1' in maps, hasattr(ctypes.CDLL(None), 'td_init'))"
    )
    assert output_of(code.format(names=names[:2])) == "True False"
    assert output_of(code.format(names=names)) == "False False"


def test_a_bundle_asks_for_no_executable_stack():
    """glibc refuses one since 2.41, also where it is asked for by saying nothing."""
    code = bundle.image(["libanl.so.1"], ["/"])
    (count,) = struct.unpack_from("<H", code, 56)
    headers = [struct.unpack_from("<2I", code, 64 + 56 * number) for number in range(count)]
    gnu_stack, read_write = 0x6474E551, 6
    assert [flags for kind, flags in headers if kind == gnu_stack] == [read_write]


def skip_without(*modules):
    for name in modules:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("first", ["dpnp", "numba_dpex"])
def test_the_mathematics_of_dpnp_works(first):
    """Its MKL, across several of its libraries."""
    skip_without(first)
    code = (
        f"import kvcache_dpex, {first}, dpnp; a = -4 * dpnp.eye(3, dtype='float32')\n"
        "print(*(float(x.sum()) for x in (dpnp.abs(a), dpnp.matmul(a, a), dpnp.linalg.solve(a, a))))"
    )
    assert output_of(code) == "12.0 48.0 3.0"


@pytest.mark.parametrize("first", ["dpnp", "numba_dpex"])
def test_the_mkl_of_dpnp_stays_out_of_the_sight_of_others(first):
    """Torch has an MKL of its own with narrower integers, and would crash in a matrix product."""
    skip_without(first)
    code = (
        f"import kvcache_dpex, {first}, ctypes; seen = ctypes.CDLL(None)\n"
        "print([name for name in ('sgemm_', 'cblas_sgemm', 'mkl_blas_sgemm') if hasattr(seen, name)])"
    )
    assert output_of(code) == "[]"


@pytest.mark.parametrize("first", ["dpnp", "torch", "numba_dpex"])
def test_torch_multiplies_beside_dpnp(first):
    skip_without("torch", first)
    code = (
        f"import kvcache_dpex, {first}, dpnp, torch; ones = torch.ones(256, 576)\n"
        "print(float(torch.nn.functional.linear(ones, torch.ones(1536, 576)).mean()))"
    )
    assert output_of(code) == "576.0"


def test_the_watcher_watches_once_and_finds_nothing():
    for _ in range(2):
        watch.start()
    watchers = [finder for finder in sys.meta_path if watch.is_watcher(finder)]
    assert watchers == [watch.watcher]
    assert watchers[0].find_spec("dpctl") is None


@pytest.mark.parametrize("module", ["dpctl", "dpnp", "numba_dpex"])
def test_the_watcher_prepares(monkeypatch, module):
    prepared = []
    monkeypatch.setattr(libraries, "prepare", prepared.append)
    for name in (module, "numpy", f"{module}.memory"):
        watch.watcher.find_spec(name)
    assert prepared == [module]


@pytest.mark.parametrize("module", ["dpctl", "dpnp", "numba_dpex"])
def test_the_finder_of_the_startup_file(monkeypatch, module):
    """It imports the package for these modules alone, and leaves them to it once it is imported."""
    startup = import_startup(monkeypatch)
    prepared = []
    monkeypatch.setattr(libraries, "prepare", prepared.append)
    assert startup.StartupFinder.find_spec(module) is None
    assert prepared == []
    monkeypatch.delitem(sys.modules, "kvcache_dpex")
    assert startup.StartupFinder.find_spec("numpy") is None
    assert prepared == []
    assert startup.StartupFinder.find_spec(module) is None
    assert prepared == [module]


def test_the_startup_file_outlives_the_package(monkeypatch):
    """Such as the checkout of an editable install that was deleted: dpnp is imported as without it."""
    startup = import_startup(monkeypatch)
    monkeypatch.delitem(sys.modules, "kvcache_dpex")
    monkeypatch.setitem(sys.modules, "kvcache_dpex.runtime.environment", None)
    assert startup.StartupFinder.find_spec("dpnp") is None


def import_startup(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(ROOT / "startup")
    monkeypatch.delitem(sys.modules, "_kvcache_dpex_startup", raising=False)
    return import_module("_kvcache_dpex_startup")


def test_the_runtime_that_dpctl_links(queue):
    """Read from the installed file, and the one that this process has loaded."""
    version = libraries.linked_sycl_version()
    assert libraries.find("libsycl").name == f"libsycl.so.{version}"
    assert libraries.loaded_sycl_versions() == {version}
    libraries.require_single_sycl()


def test_a_library_that_was_deleted_is_not_found(monkeypatch, tmp_path):
    """Its record is still there; a later folder of sys.path has another one."""
    for number in range(2):
        folder = tmp_path / str(number) / "tbb-1.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tbb\nVersion: 1\n")
        (folder / "RECORD").write_text("lib/libtbb.so.12,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / str(number)) for number in range(2)])
    assert libraries.find("libtbb") is None
    for number in (1, 0):
        library = tmp_path / str(number) / "lib" / "libtbb.so.12"
        library.parent.mkdir()
        library.touch()
        assert libraries.find("libtbb") == library


def test_loaded_versions_are_read_from_the_process_maps(monkeypatch):
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 1 /env/lib/libsycl.so.7.2.0\n"
        "7f01-7f02 r--p 00000000 08:01 1 /env/lib/libsycl.so.7.2.0\n"
        "7f02-7f03 r-xp 00000000 08:01 2 /torch/lib/libsycl.so.9\n"
        "7f03-7f04 r-xp 00000000 08:01 3 /env/lib/libsycl_helper.so.4\n"
    )
    monkeypatch.setattr(libraries.Path, "read_text", lambda path: maps)
    assert libraries.loaded_sycl_versions() == {7, 9}


@pytest.mark.parametrize(("linked", "other"), [(7, 9), (9, 7)])
def test_a_second_runtime_is_refused(monkeypatch, linked, other):
    monkeypatch.setattr(libraries, "linked_sycl_version", lambda: linked)
    monkeypatch.setattr(libraries, "loaded_sycl_versions", lambda: {7, 9})
    message = (
        f"this process has loaded SYCL runtime libsycl.so.{other} beside libsycl.so.{linked}, "
        "which the installed dpctl uses; two SYCL runtimes in one process crash it. Install the "
        "dpctl and dpnp that share the other library's runtime: `python -m kvcache_dpex doctor` "
        "names the versions"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        libraries.require_single_sycl()


@pytest.mark.parametrize(("linked", "loaded"), [(7, {7}), (9, set()), (None, {7, 9})])
def test_one_runtime_is_no_obstacle(monkeypatch, linked, loaded):
    monkeypatch.setattr(libraries, "linked_sycl_version", lambda: linked)
    monkeypatch.setattr(libraries, "loaded_sycl_versions", lambda: loaded)
    libraries.require_single_sycl()
