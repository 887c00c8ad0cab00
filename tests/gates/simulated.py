"""Runs Python with a simulated Intel GPU: Intel's Level Zero driver in the mode that captures commands.

The device reports its product's aspects and limits, compiles SPIR-V with the real compiler, and takes
allocations, launches and waits. Nothing is executed: results mean nothing there, and neither do times.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from . import native

# Slices, sub-slices and execution units, which the driver cannot ask of a device that is not there.
HARDWARE = {"tgllp": "1x6x16", "dg2": "8x4x16", "bmg": "5x4x8"}
_DRIVER = "usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1"
_SETTINGS = {
    "NEOReadDebugKeys": "1",
    "UseAubStream": "0",
    "SetCommandStreamReceiver": "1",
    # Without these two, dg2 and later products abort in this mode.
    "UseBindlessMode": "0",
    "UseExternalAllocatorForSshAndDsh": "0",
    # The newer adapter makes no queue for bmg in this mode.
    "UR_LOADER_USE_LEVEL_ZERO_V2": "0",
    "SYCL_UR_USE_LEVEL_ZERO_V2": "0",
    "ZE_ENABLE_ALT_DRIVERS": "libze_intel_gpu.so.1",
    "NEO_CACHE_PERSISTENT": "0",
}


def missing() -> str | None:
    """Why there is no simulated GPU, or None."""
    if (native.folder() / _DRIVER).exists():
        return None
    return f"no Level Zero driver in {native.folder()}; `python -m tests.gates.fetch` unpacks it there"


def python_with_newer_c_library(*first: Path) -> list[str]:
    """A command that runs this Python with the C library beside the driver; `first` is searched first."""
    libraries = (native.folder() / _DRIVER).parent.resolve()
    system = Path("/usr/lib/x86_64-linux-gnu"), Path("/lib/x86_64-linux-gnu")
    searched = [*first, libraries, Path(sysconfig.get_config_var("LIBDIR")), *system]
    path = os.pathsep.join(map(str, searched))
    loader = [str(libraries / "ld-linux-x86-64.so.2"), "--argv0", sys.executable, "--library-path", path]
    return [*loader, sys.executable]


def run(product: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run this Python, in its own environment, beside a simulated GPU of a product."""
    # The driver needs a newer C library than the system has.
    python = python_with_newer_c_library(Path(sys.prefix, "lib"))
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    root = str(Path(__file__).parents[2])
    environment.update(
        _SETTINGS,
        ProductFamilyOverride=product,
        HardwareInfoOverride=HARDWARE[product],
        PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    )
    with tempfile.TemporaryDirectory() as folder:  # the driver leaves a capture file where it runs
        return subprocess.run(
            [*python, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
