"""Whether Linux sees an Intel GPU, and why SYCL does not."""

from __future__ import annotations

import os
from pathlib import Path

INTEL = "0x8086"  # the PCI vendor
# Each of them can hide a device from SYCL.
SELECTORS = ("ONEAPI_DEVICE_SELECTOR", "SYCL_DEVICE_ALLOWLIST", "ZE_AFFINITY_MASK")
_DRIVER = (
    "sudo apt install libze-intel-gpu1 libze1 (Debian 13, Ubuntu 24.10 and later), or your distribution's "
    "intel-level-zero-gpu and level-zero"
)


def nodes() -> list[Path]:
    """Render nodes of the Intel GPUs that the Linux kernel sees, such as ``/dev/dri/renderD128``."""
    found = []
    for node in sorted(Path("/sys/class/drm").glob("renderD*")):
        vendor = node / "device/vendor"
        if vendor.is_file() and vendor.read_text().strip() == INTEL:
            found.append(Path("/dev/dri", node.name))
    return found


def selectors() -> str:
    """The variables that are set and can hide devices, as in ``ONEAPI_DEVICE_SELECTOR=opencl:cpu``."""
    return ", ".join(f"{name}={os.environ[name]}" for name in SELECTORS if os.environ.get(name))


def absence() -> str:
    """Why no Intel GPU is visible to SYCL, and what to do about it: one sentence without its full stop."""
    present = nodes()
    if present:
        reason = _reason_at(present)
    elif Path("/dev/dxg").exists():
        reason = (
            "this is WSL2, which reaches the GPU through /dev/dxg: install Intel's graphics driver on "
            f"Windows and the Level Zero driver in Linux, {_DRIVER}"
        )
    else:
        reason = (
            "the Linux kernel shows none in /sys/class/drm; on a machine that has one, install its kernel "
            f"driver (i915 or xe) and its Level Zero driver, {_DRIVER}; give a container --device /dev/dri"
        )
    hidden = selectors()
    note = f" ({hidden} is set and can hide a GPU: unset it)" if hidden else ""
    return f"no Intel GPU is visible{note}: {reason}"


def _reason_at(present: list[Path]) -> str:
    missing = [str(node) for node in present if not node.exists()]
    closed = [str(node) for node in present if not os.access(node, os.R_OK | os.W_OK)]
    if missing:
        return f"{', '.join(missing)} does not exist here: start the container with --device /dev/dri"
    if closed:
        return f"this user may not open {', '.join(closed)}: sudo usermod -aG render $USER, then log in again"
    return f"{', '.join(map(str, present))} is one, but its Level Zero driver is missing: {_DRIVER}"
