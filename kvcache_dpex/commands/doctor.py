"""Show devices, versions and kernels, and every problem with the command that solves it."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import import_module
from typing import Any

from .. import __version__
from ..runtime.compile import cache, compiler, elsewhere, package, store
from ..runtime.environment import compatibility, devices, gpu, libraries
from . import arguments, check, output

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the findings; 0 where there is no problem."""
    report = examine()
    if options.json:
        output.print_json(report)
    else:
        _print(report)
    return int(bool(report["problems"]))


def examine() -> dict[str, Any]:
    """Everything that doctor finds, as JSON has it."""
    report: dict[str, Any] = {
        "kvcache_dpex": __version__,
        "python": platform.python_version(),
        "packages": {name: compatibility.version(name) for name in PACKAGES},
        "libsycl": libraries.linked_sycl_version(),
        "opencl_driver": os.environ.get("OCL_ICD_FILENAMES") or str(libraries.find("libintelocl") or ""),
        "compiler": compiler.available(),
        "compiler_python": _compiler_python(),
        "devices": [],
        "default_device": None,
        "kernels": {},
        "notes": [],
        "problems": [],
    }
    problems = report["problems"]
    problems += _missing_packages()
    found = _look_for_devices(report)
    report["devices"] = [_describe(device) for device in sorted(found, key=devices.preference)]
    if not problems:
        problems += _failed_import("dpnp", None)
        problems += _failed_import("numba_dpex", "pip install 'kvcache_dpex[jit]'")
    _look_for_gpu(report, found)
    _look_for_kernels(report)
    if found and not problems:
        report["default_device"] = devices.default_device().filter_string
        problems += _failed_write()
    return report


def _compiler_python() -> str | None:
    """Another Python that compiles kernels, if that is so."""
    try:
        return elsewhere.named() or (None if compiler.available() else elsewhere.installed())
    except ImportError:  # `package.problems` says why
        return None


def _missing_packages() -> list[str]:
    problems = [
        f"{name} is not installed: pip install {name}"
        for name in ("dpctl", "dpnp")
        if compatibility.version(name) is None
    ]
    return problems + [found for found in (compatibility.mismatch(), compatibility.odd_pair()) if found]


def _look_for_devices(report: dict[str, Any]) -> list[Any]:
    try:
        found = devices.load_dpctl().get_devices()
    except (ImportError, RuntimeError) as error:
        if report["packages"]["dpctl"] is not None:
            report["problems"].append(str(error))
        return []
    if not found:
        report["problems"].append(f"no SYCL device found: {devices.absence()}")
    return found


def _describe(device: Any) -> dict[str, Any]:
    return {
        "device": device.filter_string,
        "name": device.name,
        "driver": device.driver_version,
        "memory": device.global_mem_size,
        "largest_allocation": device.max_mem_alloc_size,
        "work_group": device.max_work_group_size,
        "fp16": device.has_aspect_fp16,
        "fp64": device.has_aspect_fp64,
    }


def _failed_import(module: str, command: str | None) -> list[str]:
    """A problem where a module is installed and its import fails, in whatever way."""
    if compatibility.version(module.replace("_", "-")) is None:
        return []
    try:
        import_module(module)
    except Exception as error:
        remedy = command or compatibility.install_command(error)
        return [f"import {module} fails ({type(error).__name__}: {error}): {remedy}"]
    return []


def _look_for_gpu(report: dict[str, Any], found: list[Any]) -> None:
    if any(device.is_gpu for device in found):
        return
    # On a machine without one, or whose user has selected another device, it is no fault.
    wanted = gpu.nodes() and not (found and gpu.selectors())
    report["problems" if wanted else "notes"].append(gpu.absence())


def _look_for_kernels(report: dict[str, Any]) -> None:
    try:
        signatures = [store.signature(function, **choice) for function, choice in package.catalogue()]
        report["kernels"] = {
            "total": len(signatures),
            "packaged": sum(store.packaged(wanted) is not None for wanted in signatures),
            "cache": str(store.cache_folder()),
        }
        report["problems"] += package.problems()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        report["problems"].append(f"the kernels cannot be read ({error}): {store.REINSTALL}")
    report["notes"] += cache.problems()


def _failed_write() -> list[str]:
    """A problem where a write on the default device raises or is wrong."""
    device = devices.default_device().filter_string
    try:
        wrong = sum(differences for _, differences in check.plain_write(devices.queue_for()))
    except Exception as error:
        return [f"a write on {device} fails ({type(error).__name__}: {error})"]
    return [f"a write on {device} is wrong: python -m kvcache_dpex check --device {device}"] if wrong else []


def _print(report: dict[str, Any]) -> None:
    kind = "kernels compile here" if report["compiler"] else "packaged SPIR-V, no compiler"
    if report["compiler_python"]:
        kind = f"kernels compile in {report['compiler_python']}"
    print(f"kvcache_dpex {report['kvcache_dpex']} on Python {report['python']}: {kind}")
    versions = (f"{name} {version or 'not installed'}" for name, version in report["packages"].items())
    print(f"packages: {', '.join(versions)}")
    if report["libsycl"] is not None:
        driver = report["opencl_driver"] or "not found"
        print(f"SYCL runtime libsycl.so.{report['libsycl']}, OpenCL CPU driver {driver}")
    if report["devices"]:
        _print_devices(report["devices"])
    if report["kernels"]:
        kernels = report["kernels"]
        line = "{packaged} of {total} kernels packaged with this source, cache {cache}"
        print(line.format(**kernels))
    for note in report["notes"]:
        print(f"note: {note}")
    for problem in report["problems"]:
        print(f"problem: {problem}")
    if not report["problems"]:
        print(f"no problem found; the default device is {report['default_device']}")


def _print_devices(found: list[dict[str, Any]]) -> None:
    header = ["device", "name", "driver", "memory", "one allocation", "work-group", "fp16", "fp64"]
    rows = [
        [
            device["device"],
            device["name"],
            device["driver"],
            f"{device['memory'] / 2**30:.1f} GiB",
            f"{device['largest_allocation'] / 2**30:.1f} GiB",
            device["work_group"],
            "yes" if device["fp16"] else "no",
            "yes" if device["fp64"] else "no",
        ]
        for device in found
    ]
    output.print_table(header, rows)
