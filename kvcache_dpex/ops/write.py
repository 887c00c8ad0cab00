"""reshape_and_cache: new keys and values land in their slots, bit for bit."""

from __future__ import annotations

from typing import Any, Callable

from ..kernels.scatter_cpu import scatter_cpu
from ..kernels.scatter_gpu import scatter_gpu
from ..kernels.scatter_strided import scatter_strided
from ..runtime.compile import parameters
from ..runtime.launch import launch
from ..runtime.launch.arrays import Operand, read, read_output
from . import validate
from .groups import head_groups, row_groups, vector_groups
from .plan import Variant, across_items, anywhere, choose, in_units, launch_of, merged, within_items

_UNIT = 16  # the alignment of pointers that is looked at, in bytes
_launches: dict[tuple, Callable[[tuple[int, ...], Any], None]] = {}


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
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
    launch.refuse_after_fork()
    key_at, k = read(key, "key")
    value_at, v = read(value, "value")
    key_cache_at, kc = read_output(key_cache, "key_cache")
    value_cache_at, vc = read_output(value_cache, "value_cache")
    slots_at, slots = read(slot_mapping, "slot_mapping")
    alignment = (key_at | value_at | key_cache_at | value_cache_at) % _UNIT
    geometry = (k, v, kc, vc, slots, alignment, key_cache_at == value_cache_at)
    prepared = _launches.get(geometry)
    if prepared is None:
        launch.make_room(_launches)
        prepared = _launches[geometry] = _prepare(*geometry)
    if check_slots:
        validate.slot_values(slot_mapping, kc[0][0] * kc[0][1])
    prepared(
        (key_at, value_at, key_cache_at, value_cache_at, slots_at),
        (key, value, key_cache, value_cache, slot_mapping),
    )


def _prepare(
    key: tuple,
    value: tuple,
    key_cache: tuple,
    value_cache: tuple,
    slot_mapping: tuple,
    alignment: int,
    same: bool,
) -> Callable[[tuple[int, ...], Any], None]:
    """The launch for one geometry, once it is known to be right."""
    k, v, kc, vc = Operand(*key), Operand(*value), Operand(*key_cache), Operand(*value_cache)
    slots = Operand(*slot_mapping)
    _validate(k, v, kc, vc, slots)
    if slots.shape[0] == 0 or 0 in kc.shape[:3]:
        return launch.nothing
    if same:
        raise ValueError("`value_cache` must not be the memory of `key_cache`")
    return plan(k, v, kc, vc, slots, alignment or _UNIT)


def _validate(k: Operand, v: Operand, kc: Operand, vc: Operand, slots: Operand) -> None:
    validate.same_queue(key=k, value=v, key_cache=kc, value_cache=vc, slot_mapping=slots)
    validate.rows(k, v)
    validate.cache("key_cache", kc, "key", k)
    validate.cache("value_cache", vc, "value", v)
    validate.same_slots("value_cache", vc, "key_cache", kc)
    validate.slots(slots, k.shape[0])
    validate.head_sizes(k, v)
    for name, other in (("value", v), ("key_cache", kc), ("value_cache", vc)):
        if other.dtype != k.dtype:
            raise TypeError(f"`{name}` must have the dtype of `key`, {k.dtype_name}, got {other.dtype_name}")
    if k.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"`key` must have a dtype of 1, 2, 4 or 8 bytes, got {k.dtype_name}")


def plan(k: Operand, v: Operand, kc: Operand, vc: Operand, slots: Operand, alignment: int) -> launch.Launch:
    """The launch of the kernel that suits the device and the operands."""
    return choose(VARIANTS, k.queue.sycl_device, None, None, k, v, kc, vc, slots, alignment)


def _whole_rows(
    kernel: Callable, k: Operand, v: Operand, kc: Operand, vc: Operand, slots: Operand, alignment: int
) -> launch.Launch | None:
    """Rows that are contiguous in whole units and slots that are evenly spaced; None if not so."""
    rows, caches = [merged(each, 1) for each in (k, v)], [merged(merged(each, 2), 0) for each in (kc, vc)]
    unit = parameters.parse(kernel.__annotations__["key"]).unit
    row, rest = divmod(k.shape[1] * k.shape[2] * k.itemsize, unit)
    if k.shape != v.shape or rest or None in (*rows, *caches):
        return None
    num_tokens = slots.shape[0]
    groups = vector_groups if kernel is scatter_cpu else row_groups
    return launch_of(
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
) -> launch.Launch | None:
    """Any strides, by the widest word that they, the head sizes and the pointers allow."""
    if kc.shape[0] * kc.shape[1] > 2**32:
        raise ValueError(
            f"`key_cache` must have at most 2**32 slots unless its rows are contiguous multiples of "
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
    return launch_of(
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
