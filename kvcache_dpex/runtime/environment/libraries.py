"""Finds the SYCL, OpenCL and MKL libraries that pip installed, so that no library path has to be set.

Their wheels put them into a ``lib`` folder that the dynamic linker does not search. The records of the
installed distributions tell where each file is, whether pip or uv put it into a virtual environment, an
overlay of one, a prefix, the user's or Debian's folder. `prepare` loads what a module needs just before it
is imported. What the user has set (LD_LIBRARY_PATH, OCL_ICD_FILENAMES) takes precedence.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sys
from pathlib import Path

from . import bundle, watch
from .watch import is_forked as is_forked

# Each library and the distribution that has it, in the order in which they need each other.
_CORE = {
    "libintlc": "intel-cmplr-lib-rt",
    "libimf": "intel-cmplr-lib-rt",
    "libsvml": "intel-cmplr-lib-rt",
    "libirng": "intel-cmplr-lib-rt",
    "libtbb": "tbb",
    "libtbbmalloc": "tbb",
    "libOpenCL": "intel-opencl-rt",
    "libur_loader": "intel-cmplr-lib-ur",
    "libsycl": "intel-sycl-rt",
}
_MKL = {
    "libmkl_core": "mkl",
    "libmkl_tbb_thread": "mkl",
    "libmkl_intel_ilp64": "mkl",
    **{
        f"libmkl_sycl_{part}": f"onemkl-sycl-{part}"
        for part in ("blas", "lapack", "dft", "rng", "vm", "stats", "sparse")
    },
}
_OPENCL_DRIVER = {"libintelocl": "intel-opencl-rt"}
OWNERS = {**_CORE, **_MKL, **_OPENCL_DRIVER}

# Holds the value that this package has given to OCL_ICD_FILENAMES. Processes that are started from
# here inherit both and, in another environment, know that the value is not the user's.
_OWN_DRIVER = "KVCACHE_DPEX_OCL_ICD_FILENAMES"


def prepare(module: str) -> None:
    """Load the libraries of dpctl, dpnp or numba_dpex, and name the OpenCL driver to SYCL."""
    set_opencl_driver()
    preload(tuple(_CORE))
    if module != "dpctl":
        preload((*_CORE, *_MKL))


def find(stem: str) -> Path | None:
    """Path of an installed library, such as ``.../lib/libsycl.so.7`` for ``libsycl``, or None.

    Read from the records of the distribution that has it, the first one on ``sys.path`` first.
    """
    line = re.compile(rf"^(?:.*/)?{stem}\.so(?:\.\d+)?(?=,)", re.MULTILINE)
    for distribution in importlib.metadata.distributions(name=OWNERS[stem]):
        record = distribution.read_text("RECORD") or ""
        files = [Path(str(distribution.locate_file(match[0]))) for match in line.finditer(record)]
        present = [file.parent.resolve() / file.name for file in files if file.is_file()]
        if present:
            return max(present)  # libsycl.so.7, the name that the linker knows, comes after libsycl.so
    return None


def set_opencl_driver() -> None:
    """Name the OpenCL CPU driver of this environment, unless the user names one."""
    if "OCL_ICD_FILENAMES" in os.environ and not is_own_driver():
        return
    driver = find("libintelocl")
    for variable in ("OCL_ICD_FILENAMES", _OWN_DRIVER):
        if driver is not None:
            os.environ[variable] = str(driver)
        else:
            os.environ.pop(variable, None)


def is_own_driver() -> bool:
    """Whether OCL_ICD_FILENAMES has its value from this package, be it of a parent process."""
    return os.environ.get("OCL_ICD_FILENAMES") == os.environ.get(_OWN_DRIVER)


def preload(stems: tuple[str, ...]) -> None:
    """Load those of these libraries that the linker would not find for dpctl and dpnp.

    LD_LIBRARY_PATH comes before the folders of the records, so what it names is loaded from there.
    """
    linked = linked_sycl_version()
    folder = dpctl_folder()
    if linked is None or folder is None:
        return
    other_runtimes = re.compile(rf"libsycl\.so\.(?!{linked}$)")
    found = [path for path in map(find, stems) if path is not None and not other_runtimes.match(path.name)]
    # Wheels of dpctl and dpnp for the 2024 runtime have no usable search path; later ones name this folder.
    searched = folder.parent.parent.parent if linked > 7 else None
    absent = [path for path in found if searched is None or not (searched / path.name).exists()]
    if absent:
        # C++ first: libur_loader.so.0 exports parts of its own, with which no exception is caught.
        names = ["libstdc++.so.6", "libgcc_s.so.1", *(path.name for path in absent)]
        folders = tuple(dict.fromkeys(str(path.parent) for path in absent))
        _load_once(tuple(names), folders)


@functools.cache
def _load_once(names: tuple[str, ...], folders: tuple[str, ...]) -> None:
    """Load all of them, else one by one those that can be: the import then names the one that is missing."""
    if bundle.load(names, folders):
        return
    loaded: list[str] = []
    for name in names:
        if bundle.load([*loaded, name], folders):
            loaded.append(name)


def dpctl_folder() -> Path | None:
    """Folder of the package dpctl, found without importing it; None where dpctl is not installed."""
    spec = getattr(sys.modules.get("dpctl"), "__spec__", None)
    for finder in [] if spec else list(sys.meta_path):
        # A watcher would ask again.
        if hasattr(finder, "find_spec") and not watch.is_watcher(finder):
            spec = spec or finder.find_spec("dpctl", None)
    places = spec and spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def dpctl_interface() -> Path | None:
    """dpctl's C library, found without importing dpctl; None where dpctl is not installed."""
    folder = dpctl_folder()
    return next(iter(sorted(folder.glob("libDPCTLSyclInterface.so*"))), None) if folder else None


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


def was_forked_with_dpctl() -> bool:
    """Whether this process was forked from one that had loaded dpctl.

    Pages that the linker has written are shared between parent and child; a process that loads dpctl
    itself has them alone.
    """
    forked_without_exec = 0x40  # PF_FORKNOEXEC of the Linux kernel
    try:
        flags = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[6])
        mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    except OSError:
        return False
    pages = "".join(mapping for mapping in mappings if "/libDPCTLSyclInterface.so" in mapping)
    return bool(flags & forked_without_exec and re.search(r"Shared_Dirty: +[1-9]", pages))
