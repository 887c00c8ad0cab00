"""Show devices, versions and kernels, and what is missing with the command that mends it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from .. import __version__
from ..runtime.compile import compiler, store
from ..runtime.environment import compatibility, devices, libraries

PACKAGES = (
    "dpctl",
    "dpnp",
    "numpy",
    "numba-dpex",
    "numba",
    "torch",
    "intel-sycl-rt",
    "dpcpp-cpp-rt",
    "intel-opencl-rt",
)
INTEL = "0x8086"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    """Print the findings; 0 where nothing is missing."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    kind = "kernels compile here" if compiler.available() else "packaged SPIR-V, no compiler"
    console.print(f"kvcache_dpex {__version__} on Python {platform.python_version()}: {kind}")
    console.print(", ".join(f"{name} {version(name) or 'not installed'}" for name in PACKAGES))
    sycl = libraries.linked_sycl_version()
    if sycl is not None:
        driver = os.environ.get("OCL_ICD_FILENAMES") or libraries.find("libintelocl.so") or "not found"
        console.print(f"SYCL runtime libsycl.so.{sycl}, OpenCL CPU driver {driver}")
    problems, found = look_for_devices()
    if found:
        console.print(device_table(found))
    console.print(escape(kernel_line()))
    problems += missing(found)
    for problem in problems:
        console.print(f"[red]missing:[/] {escape(problem)}")
    if not problems:
        console.print("[green]nothing is missing[/]")
    return int(bool(problems))


def version(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def look_for_devices() -> tuple[list[str], list[Any]]:
    """What kept devices from being found, and the devices."""
    try:
        return [], devices.load_dpctl().get_devices()
    except (ImportError, RuntimeError) as error:
        return [str(error)], []


def device_table(found: list[Any]) -> Any:
    """A row for each device; the best one first."""
    from rich.table import Table

    table = Table("device", "name", "driver", "memory", "one allocation", "work-group", "fp16", "fp64")
    for device in sorted(found, key=devices.preference):
        table.add_row(
            device.filter_string,
            device.name,
            device.driver_version,
            f"{device.global_mem_size / 2**30:.1f} GiB",
            f"{device.max_mem_alloc_size / 2**30:.1f} GiB",
            str(device.max_work_group_size),
            "yes" if device.has_aspect_fp16 else "no",
            "yes" if device.has_aspect_fp64 else "no",
        )
    return table


def kernel_line() -> str:
    """How many kernels come from where."""
    signatures = [store.signature(function, **choice) for function, choice in store.catalogue()]
    packaged = sum(store.packaged(wanted) is not None for wanted in signatures)
    rest = len(signatures) - packaged
    line = f"{packaged} of {len(signatures)} kernels packaged with this source, cache {store.cache_folder()}"
    if rest and not compiler.available():
        line += f"; the other {rest} need a compiler: pip install 'kvcache_dpex[jit]' (Python 3.9 to 3.11)"
    return line


def missing(found: list[Any]) -> list[str]:
    """What a user of this machine would want and does not have."""
    problems = []
    for name in ("dpctl", "dpnp"):
        if version(name) is None:
            problems.append(f"{name}: pip install {name}")
    mismatch = compatibility.mismatch()
    if mismatch:
        problems.append(mismatch)
    if not any(device.is_gpu for device in found) and intel_gpu_nodes():
        problems.append(gpu_remedy())
    if not found and libraries.find("libintelocl.so") is None:
        problems.append("an OpenCL driver for the CPU device: pip install intel-opencl-rt")
    return problems


def intel_gpu_nodes() -> list[Path]:
    """Render nodes of the Intel GPUs that the Linux kernel sees."""
    return [
        Path("/dev/dri", node.name)
        for node in sorted(Path("/sys/class/drm").glob("renderD*"))
        if (node / "device/vendor").is_file() and (node / "device/vendor").read_text().strip() == INTEL
    ]


def gpu_remedy() -> str:
    """Why an Intel GPU of this machine is no SYCL device, and the command."""
    closed = [str(node) for node in intel_gpu_nodes() if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        return f"permission to open {', '.join(closed)}: sudo usermod -aG render $USER, then log in again"
    return (
        "the Level Zero driver of the Intel GPU in this machine: sudo apt install libze-intel-gpu1 libze1 "
        "(Debian, Ubuntu 24.10 and later), or your distribution's intel-level-zero-gpu"
    )
