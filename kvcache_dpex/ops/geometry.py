"""Index spaces: how many items a launch has, and how they are grouped."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dpctl


@functools.cache
def group_limit(device: dpctl.SyclDevice) -> int:
    """Items that a work-group of a device may have."""
    return device.max_work_group_size


def round_up(size: int, unit: int) -> int:
    """
    >>> round_up(65, 32)
    96
    """
    return -(-size // unit) * unit


def power_of_two(size: int) -> int:
    """The largest power of two that is not above `size`.

    >>> power_of_two(80)
    64
    """
    return 1 << (size.bit_length() - 1)


def row_groups(queue: dpctl.SyclQueue, fast: int, slow: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Global and local size for `slow` rows of `fast` items, both rounded up to whole groups.

    A GPU hides latency with many groups; on the CPU device each group costs about as much as a
    thousand items, so there groups are as large as they may be without leaving a core idle.
    """
    device = queue.sycl_device
    limit = group_limit(device)
    wanted = min(limit, 4096 if device.is_cpu else 256)
    local_fast = min(round_up(fast, 16), power_of_two(wanted))
    local_slow = max(1, min(slow, wanted // local_fast))
    return (
        (round_up(fast, local_fast), round_up(slow, local_slow)),
        (local_fast, local_slow),
    )


def lane_groups(
    lanes: int, num_kv_heads: int, num_tokens: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Global and local size for a few lanes a row: work-groups of about 128 items, heads first."""
    rows = max(1, 128 // lanes)
    heads = min(num_kv_heads, rows)
    tokens = min(num_tokens, max(1, rows // heads))
    local = (lanes, heads, tokens)
    return (lanes, round_up(num_kv_heads, heads), round_up(num_tokens, tokens)), local
