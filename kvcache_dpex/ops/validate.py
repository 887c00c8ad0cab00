"""Checks that several operations share. They read metadata only; nothing is waited for."""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Operand


def rows(key: Operand, value: Operand) -> None:
    """New rows: ``[num_tokens, num_kv_heads, head_size]``, value's head size its own."""
    for name, operand in (("key", key), ("value", value)):
        if len(operand.shape) != 3:
            raise ValueError(
                f"`{name}` must have shape [num_tokens, num_kv_heads, head_size], got {list(operand.shape)}"
            )
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"`value` must have the {key.shape[0]} tokens and {key.shape[1]} heads of `key`, "
            f"got {list(value.shape)}"
        )


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
    distinct(name, operand)


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
    from ..runtime.arrays import to_numpy

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
