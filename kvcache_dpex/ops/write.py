"""reshape_and_cache: new keys and values land in their slots, bit for bit."""

from __future__ import annotations

from typing import Any, Callable

from ..kernels.scatter_cpu import scatter_cpu
from ..kernels.scatter_gpu import scatter_gpu
from ..kernels.scatter_strided import scatter_strided
from ..runtime.compile import parameters
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan
from .declaration import Array, Written
from .groups import head_groups, row_groups, vector_groups
from .operation import operation, perform
from .plan import Variant, across_items, anywhere, choose, in_units, merged, plan_of, within_items

_UNIT = 16  # bytes, the widest access of an item


def _check(
    key: Operand,
    value: Operand,
    key_cache: Operand,
    value_cache: Operand,
    slot_mapping: Operand,
    check_slots: bool,
) -> None:
    validate.rows(key, value)
    validate.cache("key_cache", key_cache, "key", key)
    validate.cache("value_cache", value_cache, "value", value)
    validate.same_slots("value_cache", value_cache, "key_cache", key_cache)
    validate.slots(slot_mapping, key.shape[0])
    validate.head_sizes(key, value)
    for name, other in (("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        validate.same_dtype(name, other, "key", key)
    if key.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"`key` must have a dtype of 1, 2, 4 or 8 bytes, got {key.dtype_name}")


def _require_slots(key_cache: Any, slot_mapping: Any, check_slots: bool, **others: Any) -> None:
    if check_slots:
        validate.slot_values(slot_mapping, key_cache.shape[0] * key_cache.shape[1])


def _plan(
    key: Operand,
    value: Operand,
    key_cache: Operand,
    value_cache: Operand,
    slot_mapping: Operand,
    check_slots: bool,
    alignment: int,
) -> Plan | None:
    if slot_mapping.shape[0] == 0 or 0 in key_cache.shape[:3]:
        return None
    operands = key, value, key_cache, value_cache, slot_mapping
    return choose(VARIANTS, key.queue.sycl_device, None, None, *operands, alignment)


@operation(
    _check,
    _plan,
    aligned="key value key_cache value_cache",
    may_overlap=[("key_cache", "value_cache")],
    before=_require_slots,
)
def reshape_and_cache(
    key: Array,
    value: Array,
    key_cache: Written,
    value_cache: Written,
    slot_mapping: Array,
    *,
    check_slots: bool = False,
) -> None:
    """Copy row ``token`` of `key` and `value` to slot ``slot_mapping[token]`` of the caches, in place.

    Bits are moved, never interpreted: NaN payloads and every dtype of 1, 2, 4 or 8 bytes arrive as
    they are. Strides decide, never shapes: slices of a fused qkv buffer, interleaved blocks and keys
    and values packed in one row come as they are.

    Parameters
    ----------
    key, value : [num_tokens, num_kv_heads, head_size]
        New rows; `value` may have a head size of its own.
    key_cache, value_cache : [num_blocks, block_size, num_kv_heads, head_size]
        Changed in place, in the dtype of `key` and `value`. Slot ``s`` is offset ``s % block_size``
        of block ``s // block_size``.
    slot_mapping : [num_tokens], int32 or int64
        A negative slot skips its token. A slot at or beyond ``num_blocks * block_size`` is never
        written. Where slots repeat, each element is that of one of their rows, unspecified which. With fewer
        slots than tokens the surplus tokens are ignored.
    check_slots
        Read the slots back first and raise where one is too large or appears twice. This waits for
        the device and copies.

    Raises
    ------
    TypeError
        An argument is no array of the device and no torch tensor, or kinds or dtypes differ.
    ValueError
        A shape, stride or queue does not fit, a cache is read-only, or (with `check_slots`) a slot
        appears twice.
    IndexError
        With `check_slots`, a slot is beyond the capacity.

    Notes
    -----
    Ordered after all earlier work on the arrays' queue and before all later work. A GPU does not
    block the host.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> key_cache, value_cache = kv.empty_cache(4, 16, 8, 128)
    >>> key = dpnp.ones((2, 8, 128), dtype="float32", sycl_queue=key_cache.sycl_queue)
    >>> slots = dpnp.asarray([17, -1], sycl_queue=key_cache.sycl_queue)
    >>> kv.reshape_and_cache(key, 2 * key, key_cache, value_cache, slots)
    >>> float(key_cache.sum()), float(value_cache[1, 1].sum())
    (1024.0, 2048.0)
    """
    __tracebackhide__ = True
    perform(reshape_and_cache, (key, value, key_cache, value_cache, slot_mapping), (check_slots,))


def _whole_rows(
    kernel: Callable, k: Operand, v: Operand, kc: Operand, vc: Operand, slots: Operand, alignment: int
) -> Plan | None:
    """Rows that are contiguous in whole units and slots that are evenly spaced; None if not so."""
    rows, caches = [merged(each, 1) for each in (k, v)], [merged(merged(each, 2), 0) for each in (kc, vc)]
    unit = parameters.parse(kernel.__annotations__["key"]).unit
    row, rest = divmod(k.shape[1] * k.shape[2] * k.itemsize, unit)
    if k.shape != v.shape or rest or None in (*rows, *caches):
        return None
    num_tokens = slots.shape[0]
    groups = vector_groups if kernel is scatter_cpu else row_groups
    return plan_of(
        kernel,
        {"slot": slots.dtype_name},
        groups(k.queue, row, num_tokens),
        alignment,
        key=rows[0],
        value=rows[1],
        key_cache=caches[0],
        value_cache=caches[1],
        slot_mapping=slots,
        num_tokens=num_tokens,
        num_slots=kc.shape[0] * kc.shape[1],
        row=row,
    )


def _strided(
    kernel: Callable, k: Operand, v: Operand, kc: Operand, vc: Operand, slots: Operand, alignment: int
) -> Plan | None:
    """Any strides, by the widest word that they, the head sizes and the pointers allow."""
    if kc.shape[0] * kc.shape[1] >= 2**32:
        raise ValueError(
            f"`key_cache` must have fewer than 2**32 slots unless its rows are contiguous multiples of "
            f"{_UNIT} bytes, got {kc.shape[0]} blocks of {kc.shape[1]}"
        )
    operands = [k, v, kc, vc]
    whole = [merged(each, len(each.shape) - 2) for each in operands]
    if None not in whole:  # all heads as one
        operands = [_with_one_head(each) for each in whole if each]
    word = k.itemsize
    while word < 8 and alignment % (2 * word) == 0:
        wider = [in_units(each, 2 * word) for each in operands]
        if None in wider:
            break
        operands, word = [each for each in wider if each], 2 * word
    key, value, key_cache, value_cache = operands
    sizes, num_tokens = (key.shape[-1], value.shape[-1]), slots.shape[0]
    return plan_of(
        kernel,
        {"word": f"uint{8 * word}", "slot": slots.dtype_name},
        head_groups(k.queue, sizes, key.shape[1], num_tokens),
        alignment,
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slots,
        num_tokens=num_tokens,
        num_slots=kc.shape[0] * kc.shape[1],
        block_size=kc.shape[1],
        key_size=sizes[0],
        value_size=sizes[1],
    )


def _with_one_head(operand: Operand) -> Operand:
    """Rows as one head each."""
    *outer, row = operand.shape
    *strides, last = operand.strides
    return operand._replace(shape=(*outer, 1, row), strides=(*strides, row, last))


VARIANTS = (
    Variant(scatter_cpu, across_items, _whole_rows),
    Variant(scatter_gpu, within_items, _whole_rows),
    Variant(scatter_strided, anywhere, _strided),
)
