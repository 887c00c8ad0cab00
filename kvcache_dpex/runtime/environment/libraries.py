"""Finds the SYCL, OpenCL and MKL libraries that pip installed beside Python, so that nobody sets a path.

Wheels of the SYCL runtime put their libraries into ``<environment>/lib``, where the dynamic linker
does not look. `watch_imports` loads them when dpctl or dpnp is about to be imported. What the user
has set (LD_LIBRARY_PATH, OCL_ICD_FILENAMES) is respected, never overridden.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import site
import sys
from pathlib import Path

from . import bundle

# In the order in which they need each other. Newer wheels carry a search path of their own.
_CORE = (
    "libintlc.so.5",
    "libimf.so",
    "libsvml.so",
    "libirng.so",
    "libtbb.so.12",
    "libtbbmalloc.so.2",
    "libOpenCL.so.1",
    "libur_loader.so.0",
    "libsycl.so.7",
)
_MKL = (
    "libmkl_core.so.2",
    "libmkl_tbb_thread.so.2",
    "libmkl_intel_ilp64.so.2",
    "libmkl_sycl_blas.so.4",
    "libmkl_sycl_lapack.so.4",
    "libmkl_sycl_dft.so.4",
    "libmkl_sycl_rng.so.4",
    "libmkl_sycl_vm.so.4",
    "libmkl_sycl_stats.so.4",
    "libmkl_sycl_sparse.so.4",
)
_NEEDED_BY = {"dpctl": _CORE, "dpnp": _CORE + _MKL, "numba_dpex": _CORE + _MKL}


_forked = False


def watch_imports() -> None:
    """Prepare the process whenever dpctl, dpnp or numba_dpex is imported from now on."""
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())
        os.register_at_fork(after_in_child=_note_fork)


def is_forked() -> bool:
    """Whether this process is the child of a fork that happened after dpctl was loaded."""
    return _forked


def _note_fork() -> None:
    """Any operation of dpnp starts SYCL, not only ours, and nothing tells whether one has run."""
    global _forked
    _forked = "dpctl" in sys.modules


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing; loads the libraries of a module just before somebody else finds it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname in _NEEDED_BY:
            set_opencl_driver()
            preload(_NEEDED_BY[fullname])
        return


def library_folders() -> list[Path]:
    """Folders in which pip may have put libraries, nearest first."""
    prefixes = dict.fromkeys((sys.prefix, site.getuserbase(), sys.base_prefix))
    return [folder for prefix in prefixes if (folder := Path(prefix, "lib")).is_dir()]


def find(name: str) -> Path | None:
    """Path of a library in this environment, or None."""
    return next((folder / name for folder in library_folders() if (folder / name).exists()), None)


def set_opencl_driver() -> None:
    """Name the OpenCL CPU driver of this environment, unless the user names one."""
    driver = find("libintelocl.so")
    if driver is not None:
        os.environ.setdefault("OCL_ICD_FILENAMES", str(driver))


def preload(names: tuple[str, ...]) -> None:
    """Load libraries of a 2024 runtime where they are, unless LD_LIBRARY_PATH finds them."""
    sycl = find("libsycl.so.7")
    if sycl is None or linked_sycl_version() not in (None, 7):
        return
    searched = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if any(folder and Path(folder, sycl.name).exists() for folder in searched):
        return
    present = [name for name in names if sycl.with_name(name).exists()]
    # The C++ libraries first: libur_loader.so.0 exports parts of its own, with which no exception is caught.
    bundle.load(["libstdc++.so.6", "libgcc_s.so.1", *present], str(sycl.parent))


def dpctl_interface() -> Path | None:
    """dpctl's C library, found without importing dpctl; None where dpctl is not installed."""
    spec = importlib.machinery.PathFinder.find_spec("dpctl")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("libDPCTLSyclInterface.so*"))), None)


def linked_sycl_version() -> int | None:
    """Major version of the SYCL runtime that the installed dpctl links, such as 7 or 9."""
    interface = dpctl_interface()
    found = re.search(rb"libsycl\.so\.(\d+)", interface.read_bytes()) if interface else None
    return int(found[1]) if found else None


def loaded_sycl_versions() -> set[int]:
    """Major versions of the SYCL runtimes that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return set()
    return {int(version) for version in re.findall(r"/libsycl\.so\.(\d+)", maps)}


def require_single_sycl() -> None:
    """Raise where a second SYCL runtime is loaded: two of them in one process crash it."""
    linked = linked_sycl_version()
    others = loaded_sycl_versions() - {linked}
    if linked is not None and others:
        raise RuntimeError(
            f"this process has loaded SYCL runtime libsycl.so.{max(others)} beside libsycl.so.{linked}, "
            "which the installed dpctl uses; two SYCL runtimes in one process crash it. Install the "
            "dpctl and dpnp that share the other library's runtime: `python -m kvcache_dpex doctor` "
            "names the versions"
        )
