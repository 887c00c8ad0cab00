"""Chooses the device: a Level Zero GPU where there is one, else any GPU, else the CPU."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from . import compatibility, gpu, libraries

if TYPE_CHECKING:
    import dpctl


@functools.cache
def load_dpctl():
    """dpctl, once it is known to be installed, to be the only SYCL user, and to find a device."""
    try:
        import dpctl
    except ImportError as error:
        raise ImportError(
            f"kvcache_dpex needs dpctl and its SYCL runtime ({error}): {compatibility.install_command(error)}"
        ) from error
    libraries.require_single_sycl()
    return dpctl


def queue_for(device: Any = None) -> dpctl.SyclQueue:
    """The SYCL queue of a device, the very one on which dpnp puts arrays of that device.

    Parameters
    ----------
    device
        None for the best device, a dpctl filter string such as ``"level_zero:gpu:0"`` or ``"cpu"``,
        a `dpctl.SyclDevice`, or a `dpctl.SyclQueue`, which is returned as it is.

    Raises
    ------
    RuntimeError
        `device` is None and there is no device.
    ValueError
        `device` is a string that names no device of this machine.
    """
    __tracebackhide__ = True
    dpctl = load_dpctl()
    if isinstance(device, dpctl.SyclQueue):
        return device
    if device is None:
        chosen = default_device()
    elif isinstance(device, dpctl.SyclDevice):
        chosen = device
    elif isinstance(device, str):
        chosen = _device_by_filter(device)
    else:
        raise TypeError(
            "`device` must be None, a dpctl filter string, a dpctl.SyclDevice or a dpctl.SyclQueue, "
            f"got {type(device).__name__}"
        )
    return dpctl.get_device_cached_queue(chosen)


@functools.cache
def default_device() -> dpctl.SyclDevice:
    """The first Level Zero GPU, else the first GPU, else the first CPU device."""
    found = load_dpctl().get_devices()
    if not found:
        raise RuntimeError(f"no SYCL device found: {absence()}")
    return min(found, key=preference)


def preference(device: dpctl.SyclDevice) -> int:
    """Order of devices, the best first."""
    if device.is_gpu:
        return 0 if device.backend.name == "level_zero" else 1
    return 2 if device.is_cpu else 3


def _device_by_filter(text: str) -> dpctl.SyclDevice:
    __tracebackhide__ = True
    dpctl = load_dpctl()
    try:
        return dpctl.SyclDevice(text)
    except (ValueError, dpctl.SyclDeviceCreationError):
        found = dpctl.get_devices()
    there = ", ".join(device.filter_string for device in found) or f"none: {absence()}"
    # dpctl's own error says no more than that its string is bad.
    message = f"`device` {text!r} names no device here; there is {there}"
    if found and not any(device.is_gpu for device in found):
        message += f"; {gpu.absence()}"
    raise ValueError(message)


def absence() -> str:
    """Why SYCL finds no device at all, and what to do about it."""
    chosen = gpu.selectors()
    if chosen:
        return f"{chosen} hides every device; unset it"
    series = compatibility.runtime_series()
    command = f"pip install 'intel-opencl-rt=={series}'"
    named = os.environ.get("OCL_ICD_FILENAMES")
    if named is not None and not libraries.is_own_driver():
        return f"OCL_ICD_FILENAMES={named} names no OpenCL driver that works; unset it"
    driver = libraries.find("libintelocl")
    if driver is None:
        return f"the CPU device needs an OpenCL driver: {command}; {gpu.absence()}"
    installed = compatibility.version("intel-opencl-rt")
    if installed is not None and not installed.startswith(series.rstrip("*")):
        return (
            f"the OpenCL driver intel-opencl-rt {installed} does not work with the SYCL runtime of dpctl "
            f"{compatibility.version('dpctl')}: {command}"
        )
    return (
        f"the OpenCL driver {driver} was not loaded; import kvcache_dpex before anything asks SYCL for "
        "devices, or reinstall the driver: pip install --force-reinstall --no-deps "
        f"'intel-opencl-rt=={series}'"
    )
