"""How paged_attention is launched: in parts that are combined on CPU devices, by the general kernel else."""

from __future__ import annotations

import math
from typing import Any, Callable

import numpy as np

from ..kernels.combine_parts import combine_parts
from ..kernels.intrinsics import LOCAL_WORDS
from ..kernels.paged_attention_cpu import LANES, paged_attention_cpu
from ..kernels.paged_attention_strided import paged_attention_strided
from ..layout import contiguous_strides
from ..runtime.launch.arrays import Operand
from . import validate
from .attention_checks import code_type_of, type_of
from .calls import Plan, Steps
from .groups import CPU_VECTOR, group_limit, head_groups, round_up
from .plan import Variant, anywhere, choose, merged, plan_of

LOG2_E = math.log2(math.e)
NO_WINDOW = 2**31  # more than a sequence can have
MOST_SCRATCH = 2**24  # bytes; more tokens are taken in turns
LEAST_PART = 256  # positions of a context that are worth a part of their own


def plan(
    query: Operand,
    key_cache: Operand,
    value_cache: Operand,
    block_table: Operand,
    seq_lens: Operand,
    query_start_loc: Operand | None,
    key_scales: Operand | None,
    value_scales: Operand | None,
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Operand | None,
    dtype: Any,
    out: Operand,
    lse: Operand | None,
    return_lse: bool,
    format: Any,
    batch_invariant: bool,
    alignment: int,
) -> Plan | Steps | None:
    """The launches of one kind of call; None where there is nothing to do."""
    if 0 in (*query.shape[:2], block_table.shape[0]):
        return None
    scale = query.shape[2] ** -0.5 if scale is None else scale
    factor, cap = (scale * LOG2_E, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2_E)
    types = {
        "value": type_of("query", query, dtype),
        "code": code_type_of(key_cache, format, dtype),
    }
    arguments = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
        "key_scales": key_scales and validate.any_scales("key_scales", key_scales, "key_cache", key_cache),
        "value_scales": value_scales
        and validate.any_scales("value_scales", value_scales, "value_cache", value_cache),
        "sinks": sinks,
        "out": out,
        "lse": lse,
        "listed": int(query_start_loc is not None),
        "sinking": int(sinks is not None),
        "with_lse": int(lse is not None),
        "num_seqs": block_table.shape[0],
        "num_blocks": key_cache.shape[0],
        "block_size": key_cache.shape[1],
        "capacity": block_table.shape[1] * key_cache.shape[1],
        "num_kv_heads": key_cache.shape[2],
        "heads_per_kv_head": query.shape[1] // key_cache.shape[2],
        "head_size": query.shape[2],
        "value_head_size": value_cache.shape[3],
        "window": min(sliding_window or NO_WINDOW, NO_WINDOW),
        "scale_bits": _bits(factor),
        "cap_bits": _bits(cap),
    }
    return choose(
        VARIANTS,
        query.queue.sycl_device,
        types["value"],
        query.shape[2],
        types,
        arguments,
        alignment,
        batch_invariant,
    )


def _bits(number: float) -> int:
    """The bits of a float32, as a launch passes it."""
    return int(np.float32(number).view(np.int32))


def splits_of(num_groups: int, num_tokens: int, capacity: int) -> int:
    """Into how many parts a context of up to `capacity` positions is cut, so that a device has work to do.

    >>> splits_of(8, 1, 4096), splits_of(8, 3, 4096), splits_of(8, 64, 4096), splits_of(8, 1, 300)
    (8, 3, 1, 1)
    """
    return max(1, min(-(-num_groups // num_tokens), capacity // LEAST_PART))


def _runs_lanes(device: Any, value_type: str | None = None, head_size: int | None = None) -> bool:
    return device.is_cpu and LANES in device.sub_group_sizes


def _in_parts(
    kernel: Callable, types: dict[str, str], arguments: dict[str, Any], alignment: int, batch_invariant: bool
) -> Steps | None:
    """Evenly spaced slots of rows of contiguous whole sixteens; None if not so."""
    query, value_cache = arguments["query"], arguments["value_cache"]
    slots = {name: merged(arguments[name], 0) for name in ("key_cache", "value_cache")}
    scales = {name: _by_slot(arguments[name]) for name in ("key_scales", "value_scales")}
    num_slots = value_cache.shape[0] * value_cache.shape[1]
    sizes = arguments["head_size"], arguments["value_head_size"]
    if None in slots.values() or any(size % LANES for size in sizes) or not 0 < num_slots < 2**31:
        return None
    if any(scales[name] is None and arguments[name] is not None for name in scales):
        return None
    num_tokens, num_q_heads, _ = query.shape
    device, row = query.queue.sycl_device, sizes[1] + 2 * LANES
    splits = splits_of(2 * device.max_compute_units, num_tokens, arguments["capacity"])
    splits = 1 if batch_invariant else splits
    bytes_per_token = 4 * splits * num_q_heads * row
    turn = max(1, min(num_tokens, MOST_SCRATCH // bytes_per_token))
    shape = turn * splits, num_q_heads, row
    parts = Operand(shape, contiguous_strides(shape), np.dtype("float32"), query.queue)
    shared = {**arguments, **slots, **scales, "parts": parts, "splits": splits}
    plans: list[tuple[Plan, tuple[str, ...]]] = []
    for first in range(0, num_tokens, turn):
        count = min(turn, num_tokens - first)
        numbers = {"first_token": first, "num_tokens": count}
        groups = (LANES, splits, count), (LANES, 1, 1)
        attend = plan_of(kernel, types, groups, alignment, **shared, **numbers)
        groups = head_groups(query.queue, sizes[1:], num_q_heads, count)
        combine = plan_of(
            combine_parts,
            {"value": types["value"]},
            groups,
            alignment,
            **{**shared, **numbers, "head_size": sizes[1]},
        )
        if attend is None or combine is None:
            return None
        plans += [(attend, _taken(kernel)), (combine, _taken(combine_parts))]
    return Steps(tuple(plans), turn * bytes_per_token)


def _by_slot(scales: Operand | None) -> Operand | None:
    """Scales by slot, with an axis of one offset; None where slots are not evenly spaced."""
    found = merged(scales, 0)
    if found is None:
        return None
    (slots, heads), (slot, head) = found.shape, found.strides
    return found._replace(shape=(slots, 1, heads), strides=(slot, 0, head))


def _taken(kernel: Callable) -> tuple[str, ...]:
    """The arrays that a kernel takes, which are named as those of the operation."""
    names = [name for name, text in kernel.__annotations__.items() if "[" in text and name != "item"]
    return tuple("scratch" if name == "parts" else name for name in names)


def _strided(
    kernel: Callable, types: dict[str, str], arguments: dict[str, Any], alignment: int, batch_invariant: bool
) -> Plan | None:
    """Any sizes and strides."""
    query, size = arguments["query"], arguments["value_head_size"]
    device = query.queue.sycl_device
    lanes = min(round_up(-(-size // 8), CPU_VECTOR), group_limit(device), LOCAL_WORDS // 2)
    if size > 8 * lanes:
        raise ValueError(
            f"`value_cache` must have heads of at most {8 * lanes} values on {device.name}, got {size}"
        )
    groups = (lanes, *query.shape[1::-1]), (lanes, 1, 1)
    return plan_of(kernel, types, groups, alignment, **arguments, lanes=lanes)


VARIANTS = (
    Variant(paged_attention_cpu, _runs_lanes, _in_parts),
    Variant(paged_attention_strided, anywhere, _strided),
)
