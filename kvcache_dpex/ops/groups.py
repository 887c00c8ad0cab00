"""Index spaces: how many items a launch has, and how they are grouped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dpctl

# The CPU device vectorizes a work-group whose first axis is a multiple of this, and is ten times slower else.
CPU_VECTOR = 8


def group_limit(device: dpctl.SyclDevice) -> int:
    """Items that a work-group of a device may have."""
    return device.max_work_group_size


def round_up(size: int, unit: int) -> int:
    """
    >>> round_up(65, 32)
    96
    """
    return -(-size // unit) * unit


def row_groups(queue: dpctl.SyclQueue, fast: int, slow: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Global and local size for `slow` rows of `fast` items: parts of a row, and rows rounded up.

    A GPU hides latency with many groups; on the CPU device each group has a cost of its own, so there
    groups are large.
    """
    device = queue.sycl_device
    wanted = min(group_limit(device), 4096 if device.is_cpu else 256)
    parts, width = parts_of(fast, wanted)
    rows = max(1, min(slow, wanted // width))
    return (parts * width, round_up(slow, rows)), (width, rows)


def vector_groups(queue: dpctl.SyclQueue, fast: int, slow: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """As `row_groups`, and as much work a group, where one vector of items goes through a row of `fast`."""
    _, (width, rows) = row_groups(queue, fast, slow)
    vector = min(CPU_VECTOR, width)
    return (vector, round_up(slow, rows)), (vector, rows)


def parts_of(size: int, most: int) -> tuple[int, int]:
    """How many equal parts a row has and how wide they are: no wider than the row or `most`.

    A multiple of the CPU device's vector where the row is as long as that.

    >>> parts_of(128, 4096), parts_of(46, 4096), parts_of(576, 256), parts_of(5, 256)
    ((1, 128), (2, 24), (3, 192), (1, 5))
    """
    vector = min(CPU_VECTOR, most)
    if size <= vector:
        return 1, size
    parts = -(-size // most)
    while True:
        width = round_up(-(-size // parts), vector)
        if width <= min(size, most):
            return parts, width
        parts += 1


def head_groups(
    queue: dpctl.SyclQueue, sizes: tuple[int, ...], heads: int, slow: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """As `row_groups` for `slow` rows of `heads`, which hold one or two heads of these sizes."""
    _, (width, rows) = row_groups(queue, min(sizes), heads * slow)
    local_heads = max(count for count in range(1, min(heads, rows) + 1) if heads % count == 0)
    local_slow = max(1, min(slow, rows // local_heads))
    items = round_up(max(sizes), width)
    return (items, heads, round_up(slow, local_slow)), (width, local_heads, local_slow)


def lane_groups(
    queue: dpctl.SyclQueue, lanes: int, num_kv_heads: int, num_tokens: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Global and local size for a few lanes a row: work-groups of about 128 items, heads first."""
    rows = max(1, min(128, group_limit(queue.sycl_device)) // lanes)
    heads = min(num_kv_heads, rows)
    tokens = min(num_tokens, max(1, rows // heads))
    local = (lanes, heads, tokens)
    return (lanes, round_up(num_kv_heads, heads), round_up(num_tokens, tokens)), local
