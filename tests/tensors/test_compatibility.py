"""The table of torch +xpu releases, and what is said of a process that mixes runtimes."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvcache_dpex.runtime.environment import compatibility, libraries


@pytest.fixture
def installed(monkeypatch):
    """The versions that the check finds, to be changed by the test."""
    versions = {"torch": "2.13.0+xpu", "dpctl": "0.22.1", "dpnp": "0.20.0", "libsycl": 9, "loaded": {9}}
    monkeypatch.setattr(compatibility, "version", versions.get)
    monkeypatch.setattr(compatibility, "_xpu_version_of_torch", lambda: versions["torch"])
    monkeypatch.setattr(libraries, "linked_sycl_version", lambda: versions["libsycl"])
    monkeypatch.setattr(libraries, "loaded_sycl_versions", lambda: versions["loaded"])
    compatibility.require_match.cache_clear()
    yield versions
    compatibility.require_match.cache_clear()


def test_the_table_is_in_order_and_names_whole_versions():
    series = [compatibility._series(release.torch) for release in compatibility.RELEASES]
    assert series == sorted(set(series))
    for release in compatibility.RELEASES:
        assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in release[1:2] + release[3:])
        assert (release.libsycl == 9) == release.runtime.startswith("2026")


@pytest.mark.parametrize("release", compatibility.RELEASES, ids=lambda release: release.torch)
def test_every_pair_of_the_table_matches_and_the_next_newer_dpctl_does_not(release, installed):
    installed.update(
        torch=f"{release.torch}.1+xpu", dpctl=release.dpctl, dpnp=release.dpnp, libsycl=release.libsycl
    )
    assert compatibility.mismatch() is None
    compatibility.require_match()
    major, minor, _ = map(int, release.dpctl.split("."))
    installed["dpctl"] = f"{major}.{minor + 1}.0"
    assert compatibility.mismatch() == (
        f"dpctl {installed['dpctl']} needs a newer SYCL runtime than the {release.runtime} of torch "
        f"{installed['torch']}: {release.pip_command}"
    )


def test_another_libsycl_is_named_with_the_remedy(installed):
    installed.update(dpctl="0.17.0", libsycl=7)
    expected = (
        "torch 2.13.0+xpu brings libsycl.so.9, but dpctl 0.17.0 links libsycl.so.7, and two SYCL runtimes in "
        "one process crash it: pip install dpctl==0.22.1 dpnp==0.20.0 intel-sycl-rt==2026.0.0"
    )
    assert compatibility.mismatch() == expected
    with pytest.raises(RuntimeError, match=r"brings libsycl.so.9, but dpctl 0.17.0 links libsycl.so.7"):
        compatibility.require_match()


def test_a_missing_dpctl_is_named(installed):
    installed.update(dpctl=None, libsycl=None)
    assert compatibility.mismatch().startswith(
        "torch 2.13.0+xpu needs a dpctl beside it: pip install dpctl=="
    )


def test_a_newer_torch_than_the_table_is_judged_by_what_is_loaded(installed):
    installed.update(torch="3.0.0+xpu")
    assert compatibility.mismatch() is None
    installed["loaded"] = {9, 10}
    assert "is not in the table of known pairs" in compatibility.mismatch()
    assert "(libsycl.so.9, 10 beside 9)" in compatibility.mismatch()


def test_a_torch_without_xpu_goes_with_every_dpctl(installed):
    installed.update(torch=None, libsycl=7)
    assert compatibility.mismatch() is None


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.13.0+xpu", "2.13.0+xpu"), ("2.13.0", None), ("2.13.0+cpu", None), (None, None)],
)
def test_the_version_of_an_installed_torch_tells_its_support(version, expected, monkeypatch):
    monkeypatch.setattr(compatibility, "version", {"torch": version}.get)
    monkeypatch.setitem(compatibility.sys.modules, "torch", None)
    assert compatibility._xpu_version_of_torch() == expected


def test_a_newer_dpnp_alone_is_named(installed):
    installed.update(torch="2.12.0+xpu", dpctl="0.21.1", dpnp="0.20.0", libsycl=8)
    assert compatibility.mismatch() == (
        "dpnp 0.20.0 needs a newer SYCL runtime than the 2025.3.2 of torch 2.12.0+xpu: "
        "pip install dpctl==0.21.1 dpnp==0.19.1 intel-sycl-rt==2025.3.2"
    )


def test_a_newer_torch_than_the_table_without_dpctl(installed):
    installed.update(torch="3.0.0+xpu", libsycl=None, loaded={10})
    assert "load different SYCL runtimes (libsycl.so.10 beside None)" in compatibility.mismatch()
    installed["loaded"] = set()
    assert "load different SYCL runtimes (libsycl.so.none beside None)" in compatibility.mismatch()


@pytest.mark.parametrize(
    ("xpu", "expected"), [("20260000", "2.13.0+xpu"), (None, None)], ids=["with XPU", "without"]
)
def test_the_torch_of_this_process(xpu, expected, monkeypatch):
    """What is loaded counts, whatever is installed."""
    version = SimpleNamespace(__version__="2.13.0+xpu", xpu=xpu)
    monkeypatch.setattr(compatibility, "version", {"torch": "2.13.0+xpu"}.get)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=version))
    assert compatibility._xpu_version_of_torch() == expected


def test_a_torch_that_another_thread_is_importing(monkeypatch):
    """It has no version yet, so that of the installed one counts."""
    monkeypatch.setattr(compatibility, "version", {"torch": "2.13.0+xpu"}.get)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert compatibility._xpu_version_of_torch() == "2.13.0+xpu"


@pytest.mark.parametrize(
    ("error", "libsycl", "command"),
    [
        ("No module named 'dpctl'", None, "pip install dpctl dpnp"),
        ("libintlc.so.5: cannot open shared object file", 7, "pip install 'intel-cmplr-lib-rt==2024.2.*'"),
        ("libsycl.so.8: cannot open shared object file", 8, "pip install 'intel-sycl-rt==2025.*'"),
        ("libmkl_sycl_blas.so.6: cannot open", 9, "pip install 'onemkl-sycl-blas==2026.*'"),
        ("libtbb.so.12: cannot open shared object file", 9, "pip install tbb"),
    ],
)
def test_the_command_for_a_failed_import(monkeypatch, error, libsycl, command):
    """In the release that the installed dpctl needs, which pip would not choose by itself."""
    monkeypatch.setattr(compatibility, "version", lambda name: None)
    monkeypatch.setattr(libraries, "linked_sycl_version", lambda: libsycl)
    assert compatibility.install_command(ImportError(error)) == command


@pytest.mark.parametrize(
    "error", ["libother.so.1: cannot open shared object file", "numpy.dtype size changed"]
)
def test_the_command_for_a_failed_import_of_installed_packages(monkeypatch, error):
    """`pip install dpctl dpnp` would do nothing."""
    monkeypatch.setattr(compatibility, "version", {"dpctl": "0.22.1", "dpnp": "0.20.0"}.get)
    command = "pip install --force-reinstall --no-deps dpctl==0.22.1 dpnp==0.20.0"
    assert compatibility.install_command(ImportError(error)) == command


@pytest.mark.parametrize(
    ("dpctl", "dpnp", "built"),
    [
        ("0.17.0", "0.20.0", "0.15.0"),
        ("0.22.1", "0.19.1", "0.20.0"),
        ("0.22.2", "0.20.3", None),
        ("0.17.0", "0.15.0", None),
        ("0.30.0", "0.20.0", None),
        (None, "0.20.0", None),
        ("0.22.1", None, None),
    ],
)
def test_a_dpnp_that_was_built_with_another_dpctl(monkeypatch, dpctl, dpnp, built):
    monkeypatch.setattr(compatibility, "version", {"dpctl": dpctl, "dpnp": dpnp}.get)
    found = built and f"dpnp {dpnp} was not built with dpctl {dpctl}: pip install dpnp=={built}"
    assert compatibility.odd_pair() == found


def test_this_process_matches():
    assert compatibility.mismatch() is None
