"""Chooses the device: a Level Zero GPU where there is one, else any GPU, else the CPU."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from . import libraries

if TYPE_CHECKING:
    import dpctl


@functools.cache
def load_dpctl():
    """dpctl, once it is known to be installed, to be the only SYCL user, and to find a device."""
    try:
        import dpctl
    except ImportError as error:
        raise ImportError(
            f"kvcache_dpex needs dpctl and its SYCL runtime ({error}): pip install dpctl dpnp"
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
    """
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
        raise RuntimeError(f"no SYCL device found; {_remedy()}")
    return min(found, key=preference)


def preference(device: dpctl.SyclDevice) -> int:
    """Order of devices, the best first."""
    if device.is_gpu:
        return 0 if device.backend.name == "level_zero" else 1
    return 2 if device.is_cpu else 3


def _device_by_filter(text: str) -> dpctl.SyclDevice:
    dpctl = load_dpctl()
    try:
        return dpctl.SyclDevice(text)
    except (ValueError, dpctl.SyclDeviceCreationError) as error:
        found = ", ".join(device.filter_string for device in dpctl.get_devices())
        raise ValueError(
            f"`device` {text!r} names no device here; there is {found or 'none: ' + _remedy()}"
        ) from error


def _remedy() -> str:
    if libraries.find("libintelocl.so") is None:
        return "for the CPU device: pip install intel-opencl-rt; for an Intel GPU, its Level Zero driver"
    return (
        "import kvcache_dpex before dpctl or dpnp and leave ONEAPI_DEVICE_SELECTOR and OCL_ICD_FILENAMES "
        "unset; `python -m kvcache_dpex doctor` shows what was found"
    )
