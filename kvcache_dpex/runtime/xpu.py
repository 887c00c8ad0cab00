"""Torch's XPU streams as SYCL queues. Written from torch's sources; not yet run on an Intel GPU.

A stream of torch is an in-order ``sycl::queue`` in the default context of its platform, and
``Stream.sycl_queue`` is its address. dpctl adopts it, so a launch goes to the very queue that torch
works on: earlier and later operations of torch are ordered with it, and nothing waits or copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import compatibility, devices, launch

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


def _adopt(address: int) -> dpctl.SyclQueue:
    """A reference of our own to a ``sycl::queue``."""
    compatibility.require_match()
    return devices.load_dpctl().SyclQueue(launch.capsule(address, b"SyclQueueRef"))
