"""Torch's XPU streams as SYCL queues. Written from torch's sources; not yet run on an Intel GPU.

A stream of torch is an in-order ``sycl::queue`` in the default context of its platform, and
``Stream.sycl_queue`` is its address. dpctl adopts it, so a launch goes to the very queue that torch
works on: earlier and later operations of torch are ordered with it, and nothing waits or copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..environment import compatibility, devices
from .interface import capsule

if TYPE_CHECKING:
    import dpctl

_adopted: dict[int, dpctl.SyclQueue] = {}


def current_queue(index: int) -> dpctl.SyclQueue:
    """The queue of torch's current stream on XPU number `index`."""
    stream = torch.xpu.current_stream(index)
    address = stream.sycl_queue
    # torch never ends its own streams; one made from an outside queue may die and its address live on.
    if stream.stream_id == address:
        return _adopt(address)
    queue = _adopted.get(address)
    if queue is None:
        queue = _adopted.setdefault(address, _adopt(address))
    return queue


def wait(index: int) -> None:
    """Return when torch's current stream on XPU number `index` has nothing left to do."""
    torch.xpu.current_stream(index).synchronize()


def import_array(usm: Any) -> torch.Tensor:
    """A tensor in the memory of a GPU's usm_ndarray, on which no work is running."""
    if usm.usm_type != "device":
        raise ValueError(
            f"`array` must be of USM type 'device' for torch's XPU, got {usm.usm_type!r}; allocate it with "
            "usm_type='device'"
        )
    device = usm.sycl_device
    if device.backend.name != "level_zero" or usm.sycl_context != device.sycl_platform.default_context:
        raise ValueError(
            "`array` must be in the default context of a Level Zero platform, as arrays of "
            f"dpnp.empty(..., device='level_zero:gpu') are, got {device.filter_string}"
        )
    compatibility.require_match()
    # A capsule, for torch passes no stream to SYCL's producers and mistakes the number of the device.
    return torch.from_dlpack(usm.__dlpack__())


def _adopt(address: int) -> dpctl.SyclQueue:
    """A reference of our own to a ``sycl::queue``."""
    compatibility.require_match()
    return devices.load_dpctl().SyclQueue(capsule(address, b"SyclQueueRef"))
