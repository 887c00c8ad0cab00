"""Checks that several operations share. They read metadata only; nothing is waited for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import formats
from ..runtime.launch.arrays import Operand


def rows(key: Operand, value: Operand) -> None:
    """New rows: ``[num_tokens, num_kv_heads, head_size]``, value's head size its own."""
    for name, operand in (("key", key), ("value", value)):
        if len(operand.shape) != 3:
            batch_of_one = len(operand.shape) == 4 and operand.shape[0] == 1
            raise ValueError(
                f"`{name}` must have shape [num_tokens, num_kv_heads, head_size], got {list(operand.shape)}"
                + (
                    f"; rows of transformers, [1, num_kv_heads, num_tokens, head_size], are "
                    f"{name}[0].swapaxes(0, 1)"
                    if batch_of_one
                    else ""
                )
            )
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"`value` must have the {key.shape[0]} tokens and {key.shape[1]} heads of `key`, "
            f"got {list(value.shape)}"
        )


def head_sizes(key: Operand, value: Operand) -> None:
    """Heads of at least one value."""
    for name, operand in (("key", key), ("value", value)):
        if operand.shape[2] == 0:
            raise ValueError(f"`{name}` must have a head_size >= 1, got shape {list(operand.shape)}")


def cache(name: str, operand: Operand, rows_name: str, rows: Operand) -> None:
    """A cache ``[num_blocks, block_size, num_kv_heads, head_size]`` that takes these rows."""
    if len(operand.shape) != 4:
        raise ValueError(
            f"`{name}` must have shape [num_blocks, block_size, num_kv_heads, head_size], "
            f"got {list(operand.shape)}"
        )
    if operand.shape[2:] != rows.shape[1:]:
        raise ValueError(
            f"`{name}` holds rows of {operand.shape[2]} heads of {operand.shape[3]}, but "
            f"`{rows_name}` has {rows.shape[1]} heads of {rows.shape[2]}"
        )


def same_slots(name: str, operand: Operand, other_name: str, other: Operand) -> None:
    """Two caches that one slot mapping addresses."""
    if operand.shape[:2] != other.shape[:2]:
        raise ValueError(
            f"`{name}` must have the {other.shape[0]} blocks of {other.shape[1]} slots of "
            f"`{other_name}`, got {operand.shape[0]} blocks of {operand.shape[1]}"
        )


def distinct(name: str, operand: Operand) -> None:
    """No two elements of an output may share memory."""
    shared = any(stride == 0 and size > 1 for size, stride in zip(operand.shape, operand.strides))
    if shared and 0 not in operand.shape:
        raise ValueError(
            f"`{name}` is written, so its elements must not share memory, got strides "
            f"{list(operand.strides)}; copy the broadcast array first"
        )


def result(name: str, operand: Operand, wanted: Any) -> None:
    """An array that takes a result has its shape."""
    if tuple(operand.shape) != tuple(wanted.shape):
        raise ValueError(f"`{name}` must have shape {list(wanted.shape)}, got {list(operand.shape)}")


def same_dtype(name: str, operand: Operand, other_name: str, other: Operand) -> None:
    """Two arrays of one dtype."""
    given, wanted = operand.dtype_name, other.dtype_name
    if operand.dtype == other.dtype:
        return
    message = f"`{name}` must have the dtype of `{other_name}`, {wanted}, got {given}"
    if {given, wanted} == {"uint16", "bfloat16"}:
        viewed = name if given == "uint16" else other_name
        raise TypeError(f"{message}; if it holds the bits of bfloat16, pass {viewed}.view(torch.bfloat16)")
    if wanted == "float64" and given in ("float32", "float16", "bfloat16"):
        how = f"to(torch.{given})" if _is_tensor(other) else f'astype("{given}")'
        raise TypeError(f"{message}; convert `{other_name}` with {other_name}.{how}")
    raise TypeError(message)


def of_type(name: str, operand: Operand, wanted: str) -> None:
    """An array of one dtype."""
    if operand.dtype_name != wanted:
        raise TypeError(f"`{name}` must be {wanted}, got {operand.dtype_name}")


def of_shape(name: str, operand: Operand, wanted: tuple[int, ...], meaning: str) -> None:
    """An array of one shape, whose sizes are what `meaning` says."""
    if tuple(operand.shape) != wanted:
        raise ValueError(f"`{name}` must have shape {meaning} = {list(wanted)}, got {list(operand.shape)}")


def float_type(name: str, operand: Operand, dtype: Any) -> str:
    """What the values of rows are: "float32", "float16" or "bfloat16"."""
    given = operand.dtype_name
    wanted = given if dtype is None else _name_of(dtype)
    if wanted == "bfloat16" and given in ("uint16", "bfloat16"):
        return wanted
    if wanted in ("float32", "float16") and given == wanted:
        return wanted
    raise TypeError(
        f"`{name}` must be float32, float16, or bfloat16 (bits as uint16, with dtype='bfloat16'), got {given}"
        + ("" if dtype is None else f" with dtype={dtype!r}")
    )


def float_name(name: str, dtype: Any) -> str:
    """A dtype as "float32", "float16" or "bfloat16"."""
    found = _name_of(dtype)
    if found not in ("float32", "float16", "bfloat16"):
        raise TypeError(f"`{name}` must be float32, float16 or bfloat16, got {dtype!r}")
    return found


def _name_of(dtype: Any) -> str:
    return np.dtype(dtype).name if isinstance(dtype, type) else str(dtype).removeprefix("torch.")


def codes(name: str, operand: Operand, format: Any = None, known: Any = None) -> str:
    """The type of the codes in an array, such as "int8"."""
    return formats.of_codes(name, operand.dtype_name, format, known).dtype


def scales(name: str, operand: Operand, codes_name: str, codes: Operand) -> Operand:
    """The scales of a cache of codes, as ``[num_blocks, block_size, num_kv_heads]``."""
    of_type(name, operand, "float32")
    num_blocks, block_size, num_kv_heads = codes.shape[:3]
    if operand.shape == (num_blocks * block_size, num_kv_heads):
        slot, head = operand.strides
        operand = operand._replace(shape=codes.shape[:3], strides=(slot * block_size, slot, head))
    if operand.shape != codes.shape[:3]:
        raise ValueError(
            f"`{name}` must have shape [num_blocks * block_size, num_kv_heads] = "
            f"[{num_blocks * block_size}, {num_kv_heads}] for `{codes_name}`, got {list(operand.shape)}"
        )
    return operand


def any_scales(name: str, operand: Operand, codes_name: str, codes: Operand) -> Operand:
    """As `scales`, where one scale for all rows, or one for each head, will do as well."""
    if len(operand.shape) > 1:
        return scales(name, operand, codes_name, codes)
    return given_scale(name, operand, codes.shape[:3])


def given_scale(name: str, operand: Operand, rows: tuple[int, ...]) -> Operand:
    """One scale for all rows ``[num_blocks, block_size, num_kv_heads]``, or one for each head, as theirs."""
    of_type(name, operand, "float32")
    if operand.shape not in ((), (1,), rows[2:]):
        raise ValueError(
            f"`{name}` must have shape [1] or [num_kv_heads] = [{rows[2]}], got {list(operand.shape)}"
        )
    step = operand.strides[0] if operand.shape == rows[2:] else 0
    return operand._replace(shape=rows, strides=(0, 0, step))


def blocks(operand: Operand) -> Operand:
    """A list or table of blocks, as a list."""
    if operand.dtype_name not in ("int32", "int64"):
        raise TypeError(f"`blocks` must be int32 or int64, got {operand.dtype_name}")
    return leading_axes_merged("blocks", operand, len(operand.shape))


def leading_axes_merged(name: str, operand: Operand, count: int) -> Operand:
    """The operand with its first `count` axes as one, which their strides must allow."""
    sizes, strides = operand.shape[:count], operand.strides[:count]
    total = math.prod(sizes)
    step = strides[-1] if count else 1
    evenly = all(
        outer == inner * size
        for outer, inner, size, repeats in zip(strides, strides[1:], sizes[1:], sizes)
        if repeats > 1
    )
    if total and not evenly:
        raise ValueError(
            f"`{name}` must have evenly spaced blocks, got strides {list(strides)} for {list(sizes)}; "
            "copy it first"
        )
    return operand._replace(shape=(total, *operand.shape[count:]), strides=(step, *operand.strides[count:]))


def slots(slot_mapping: Operand, num_tokens: int) -> None:
    """``[num_slots_given]`` int32 or int64, at most one a token."""
    if slot_mapping.dtype_name not in ("int32", "int64"):
        raise TypeError(f"`slot_mapping` must be int32 or int64, got {slot_mapping.dtype_name}")
    if len(slot_mapping.shape) != 1:
        raise ValueError(f"`slot_mapping` must have shape [num_tokens], got {list(slot_mapping.shape)}")
    if slot_mapping.shape[0] > num_tokens:
        raise ValueError(
            f"`slot_mapping` must have at most one slot for each of the {num_tokens} tokens, "
            f"got {slot_mapping.shape[0]}"
        )


def same_queue(**operands: Operand) -> None:
    """All on one SYCL queue, tensors with tensors; the first argument's decides."""
    (first_name, first), *rest = operands.items()
    for name, operand in rest:
        if _is_tensor(operand) != _is_tensor(first):
            tensor, array = (name, first_name) if _is_tensor(operand) else (first_name, name)
            raise TypeError(
                f"`{tensor}` is a torch.Tensor but `{array}` is an array of dpnp; all must be of one kind: "
                f"kvcache_dpex.torch.to_torch({array}) shares its memory with torch"
            )
        if operand.queue != first.queue:
            target = f"({first_name}.device)" if _is_tensor(first) else f"_device({first_name}.sycl_queue)"
            raise ValueError(
                f"`{name}` must be on the queue of `{first_name}` ({first.queue.sycl_device.name}), "
                f"got another one ({operand.queue.sycl_device.name}); move it with {name}.to{target}"
            )


def _is_tensor(operand: Operand) -> bool:
    return type(operand.dtype).__module__ == "torch"


def slot_values(slot_mapping: Any, num_slots: int) -> None:
    """The values of a slot mapping: none beyond the capacity, none twice. Waits and copies."""
    from ..runtime.launch.arrays import to_numpy

    values = to_numpy(slot_mapping)
    seen: dict[int, int] = {}
    for token, slot in enumerate(values.tolist()):
        if slot >= num_slots:
            raise IndexError(
                f"`slot_mapping[{token}]` must be < {num_slots} (num_blocks * block_size), got {slot}"
            )
        if slot >= 0 and slot in seen:
            raise ValueError(
                f"`slot_mapping[{token}]` is slot {slot}, which token {seen[slot]} writes already"
            )
        seen[slot] = token
