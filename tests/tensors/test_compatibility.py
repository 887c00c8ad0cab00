"""The table of torch +xpu releases, and what is said of a process that mixes runtimes."""

import re

import pytest

from kvcache_dpex.runtime.environment import compatibility, libraries


@pytest.fixture
def installed(monkeypatch):
    """The versions that the check finds, to be changed by the test."""
    versions = {"torch": "2.13.0+xpu", "dpctl": "0.22.1", "dpnp": "0.20.0", "libsycl": 9, "loaded": {9}}
    monkeypatch.setattr(compatibility, "_version", versions.get)
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
    monkeypatch.setattr(compatibility, "_version", {"torch": version}.get)
    monkeypatch.setitem(compatibility.sys.modules, "torch", None)
    assert compatibility._xpu_version_of_torch() == expected


def test_this_process_matches():
    assert compatibility.mismatch() is None
