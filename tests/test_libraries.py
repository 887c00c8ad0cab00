"""Finding the SYCL, OpenCL and MKL libraries; two SYCL runtimes in one process are refused."""

import os
import re
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import output_of
from kvcache_dpex.runtime.environment import bundle, libraries

USE = """
import kvcache_dpex
key_cache, value_cache = kvcache_dpex.empty_cache(2, 4, 1, 8)
print(int((key_cache + 1).sum()))
"""


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """An environment's lib folder with these files, as the only place to look."""

    def make(*names):
        folder = tmp_path / "lib"
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).write_bytes(b"")
        return folder

    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    monkeypatch.setattr(libraries.site, "getuserbase", lambda: str(tmp_path / "user"))
    return make


def test_without_any_variable():
    """A43: neither LD_LIBRARY_PATH nor OCL_ICD_FILENAMES nor a selector is needed."""
    unset = dict.fromkeys(("LD_LIBRARY_PATH", "OCL_ICD_FILENAMES", "ONEAPI_DEVICE_SELECTOR"))
    assert output_of(USE, **unset) == "64"


def test_with_the_libraries_on_the_users_path():
    assert output_of(USE, LD_LIBRARY_PATH=str(Path(sys.prefix, "lib"))) == "64"


@pytest.mark.parametrize("order", ["import kvcache_dpex, dpctl, dpnp", "import kvcache_dpex, dpnp, dpctl"])
def test_importing_the_package_first_lets_the_others_load(order):
    assert output_of(order + "; print(int(dpnp.ones(3).sum()), len(dpctl.get_devices()) > 0)") == "3 True"


def test_find(environment):
    folder = environment("libsycl.so.7")
    assert libraries.find("libsycl.so.7") == folder / "libsycl.so.7"
    assert libraries.find("libsycl.so.8") is None


def test_the_opencl_driver_of_the_environment(environment, monkeypatch):
    monkeypatch.delenv("OCL_ICD_FILENAMES", raising=False)
    environment()
    libraries.set_opencl_driver()
    assert "OCL_ICD_FILENAMES" not in os.environ
    folder = environment("libintelocl.so")
    libraries.set_opencl_driver()
    assert os.environ["OCL_ICD_FILENAMES"] == str(folder / "libintelocl.so")


def test_the_users_opencl_driver_stays(environment, monkeypatch):
    monkeypatch.setenv("OCL_ICD_FILENAMES", "/their/driver.so")
    environment("libintelocl.so")
    libraries.set_opencl_driver()
    assert os.environ["OCL_ICD_FILENAMES"] == "/their/driver.so"


@pytest.fixture
def opened(monkeypatch):
    """Names of the libraries that would be loaded."""
    names = []
    monkeypatch.setattr(libraries.bundle, "load", lambda wanted, folder: names.extend(wanted))
    return names


@pytest.mark.parametrize(
    ("linked", "searched", "expected"),
    [
        (7, "", ["libstdc++.so.6", "libgcc_s.so.1", "libintlc.so.5", "libsycl.so.7"]),
        (None, "/elsewhere", ["libstdc++.so.6", "libgcc_s.so.1", "libintlc.so.5", "libsycl.so.7"]),
        (9, "", []),
        (7, "{lib}", []),
        (7, "/elsewhere:{lib}", []),
    ],
    ids=["2024 runtime", "dpctl unknown", "newer dpctl", "user's path", "user's second path"],
)
def test_preload(environment, monkeypatch, opened, linked, searched, expected):
    """In the order of their needs, and only for the 2024 runtime that the user's path does not name."""
    folder = environment("libsycl.so.7", "libintlc.so.5")
    monkeypatch.setattr(libraries, "linked_sycl_version", lambda: linked)
    monkeypatch.setenv("LD_LIBRARY_PATH", searched.format(lib=folder))
    libraries.preload(libraries._CORE)
    assert opened == expected


def test_preload_without_a_2024_runtime(environment, opened):
    environment("libintlc.so.5", "libsycl.so.9")
    libraries.preload(libraries._CORE)
    assert opened == []


def test_a_bundle_loads_libraries_that_only_they_see():
    """The C library's own, by name, into a scope where nobody else looks."""
    names = ["libanl.so.1", "libthread_db.so.1", "libnone.so.0"]
    code = (
        "import ctypes; from kvcache_dpex.runtime.environment import bundle; from pathlib import Path\n"
        "bundle.load({names}, '/'); maps = Path('/proc/self/maps').read_text()\n"
        "print('libthread_db.so.1' in maps, hasattr(ctypes.CDLL(None), 'td_init'))"
    )
    assert output_of(code.format(names=names[:2])) == "True False"
    assert output_of(code.format(names=names)) == "False False"


def test_a_bundle_asks_for_no_executable_stack():
    """glibc refuses one since 2.41, also where it is asked for by saying nothing."""
    code = bundle.image(["libanl.so.1"], "/")
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
        libraries.watch_imports()
    watchers = [finder for finder in sys.meta_path if isinstance(finder, libraries._Watcher)]
    assert len(watchers) == 1
    assert watchers[0].find_spec("dpctl") is None


def test_the_runtime_that_dpctl_links(queue):
    """A9: read from the installed file, and the one that this process has loaded."""
    version = libraries.linked_sycl_version()
    assert Path(sys.prefix, "lib", f"libsycl.so.{version}").exists()
    assert libraries.loaded_sycl_versions() == {version}
    libraries.require_single_sycl()


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
