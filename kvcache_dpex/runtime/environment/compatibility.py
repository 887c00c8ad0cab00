"""Which releases of dpctl, dpnp, the SYCL runtime and torch work together in one process.

A torch with XPU support brings a SYCL runtime of its own. dpctl must link the same ``libsycl.so``
and must not be newer than that runtime; two runtimes in one process crash it. A torch without XPU
support brings none and works with every dpctl.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from typing import NamedTuple

from . import libraries


class Release(NamedTuple):
    """One torch +xpu release: the SYCL runtime that it pins, and the newest dpctl and dpnp for it."""

    torch: str
    runtime: str
    libsycl: int
    dpctl: str
    dpnp: str

    @property
    def pip_command(self) -> str:
        return f"pip install dpctl=={self.dpctl} dpnp=={self.dpnp} intel-sycl-rt=={self.runtime}"


# Runtime pins as published with torch's wheels; dpctl and dpnp by their undefined symbols. Every row's
# three pins resolve together (`pip install --dry-run`), but no torch +xpu itself has run beside them.
RELEASES = (
    Release("2.6", "2025.0.2", 8, "0.18.3", "0.16.3"),
    Release("2.7", "2025.0.4", 8, "0.18.3", "0.16.3"),
    Release("2.8", "2025.1.1", 8, "0.19.0", "0.17.0"),
    Release("2.9", "2025.2.1", 8, "0.20.2", "0.18.1"),
    Release("2.10", "2025.3.1", 8, "0.21.1", "0.19.1"),
    Release("2.11", "2025.3.2", 8, "0.21.1", "0.19.1"),
    Release("2.12", "2025.3.2", 8, "0.21.1", "0.19.1"),
    Release("2.13", "2026.0.0", 9, "0.22.1", "0.20.0"),
    Release("2.14", "2026.1.0", 9, "0.22.1", "0.20.0"),
)


# Releases of the SYCL runtime, its compiler libraries and MKL that go with each libsycl.so.
_RUNTIME_SERIES = {7: "2024.2.*", 8: "2025.*", 9: "2026.*"}


def runtime_series() -> str:
    """Releases of Intel's runtime wheels that go with the installed dpctl, as pip takes them."""
    return _RUNTIME_SERIES.get(libraries.linked_sycl_version() or 0, "2026.*")


def install_command(error: Exception) -> str:
    """The command that installs what a failed import of dpctl or dpnp lacks.

    A library that the error names is installed in the release that the installed dpctl needs; where both
    packages are there and no library is missing, they are installed anew.
    """
    library = re.search(r"(lib\w+)\.so", str(error))
    owner = libraries.OWNERS.get(library[1]) if library else None
    if owner is not None:
        # tbb counts its releases in another way.
        return "pip install tbb" if owner == "tbb" else f"pip install '{owner}=={runtime_series()}'"
    dpctl, dpnp = version("dpctl"), version("dpnp")
    if dpctl is None or dpnp is None or isinstance(error, ModuleNotFoundError):
        return "pip install dpctl dpnp"
    return f"pip install --force-reinstall --no-deps dpctl=={dpctl} dpnp=={dpnp}"


def release_of(torch_version: str) -> Release | None:
    """The table's row for a torch version, with or without a local part.

    >>> release_of("2.13.0+xpu").dpctl
    '0.22.1'
    """
    series = ".".join(torch_version.split("+")[0].split(".")[:2])
    return next((release for release in RELEASES if release.torch == series), None)


def mismatch() -> str | None:
    """What keeps the installed torch, dpctl and dpnp out of one process, with the remedy; None if nothing.

    Reads versions only: neither torch nor dpctl is imported.
    """
    torch_version = _xpu_version_of_torch()
    if torch_version is None:
        return None
    release = release_of(torch_version)
    linked = libraries.linked_sycl_version()
    if release is None:
        loaded = libraries.loaded_sycl_versions()
        if linked is None or loaded - {linked}:
            return (
                f"torch {torch_version} is not in the table of known pairs, and it and the installed dpctl "
                f"load different SYCL runtimes (libsycl.so.{_listed(loaded)} beside {linked})"
            )
        return None
    if linked is None:
        return f"torch {torch_version} needs a dpctl beside it: {release.pip_command}"
    if linked != release.libsycl:
        return (
            f"torch {torch_version} brings libsycl.so.{release.libsycl}, but dpctl {version('dpctl')} links "
            f"libsycl.so.{linked}, and two SYCL runtimes in one process crash it: {release.pip_command}"
        )
    for name, newest in (("dpctl", release.dpctl), ("dpnp", release.dpnp)):
        installed = version(name)
        if installed is not None and _series(installed) > _series(newest):
            return (
                f"{name} {installed} needs a newer SYCL runtime than the {release.runtime} of torch "
                f"{torch_version}: {release.pip_command}"
            )
    return None


def odd_pair() -> str | None:
    """What is wrong where the installed dpnp was built with another dpctl, with the remedy; else None."""
    dpctl, dpnp = version("dpctl"), version("dpnp")
    pairs = {_series("0.17.0"): "0.15.0", **{_series(release.dpctl): release.dpnp for release in RELEASES}}
    built = pairs.get(_series(dpctl)) if dpctl else None
    if built is None or dpnp is None or _series(dpnp) == _series(built):
        return None
    return f"dpnp {dpnp} was not built with dpctl {dpctl}: pip install dpnp=={built}"


@functools.cache
def require_match() -> None:
    """Raise RuntimeError where `mismatch` finds one."""
    found = mismatch()
    if found:
        raise RuntimeError(found)


def _xpu_version_of_torch() -> str | None:
    """Version of the torch of this process or environment if it has XPU support, else None."""
    # Another thread may be importing it: then it has no version yet.
    loaded = getattr(sys.modules.get("torch"), "version", None)
    if loaded is not None:
        return loaded.__version__ if getattr(loaded, "xpu", None) else None
    installed = version("torch")
    return installed if installed and installed.endswith("+xpu") else None


def version(package: str) -> str | None:
    """Version of an installed distribution, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _series(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _listed(versions: set[int]) -> str:
    return ", ".join(map(str, sorted(versions))) or "none"
