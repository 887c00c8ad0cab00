"""reshape_and_cache_fp8: new keys and values land as fp8 codes, divided by scales that are given."""

from __future__ import annotations

from functools import partial
from typing import Any

from .. import formats
from ..kernels.cast_gpu import cast_gpu
from ..kernels.cast_strided import cast_strided
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan
from .declaration import Array, DType, Name, Written
from .operation import operation, perform
from .plan import Variant, anywhere, choose
from .quantize import in_eights, in_groups, in_lanes


def _check(
    key: Operand,
    value: Operand,
    key_cache: Operand,
    value_cache: Operand,
    k_scale: Operand,
    v_scale: Operand,
    slot_mapping: Operand,
    dtype: Any,
    format: Any,
    check_slots: bool,
) -> None:
    validate.rows(key, value)
    validate.float_type("key", key, dtype)
    validate.same_dtype("value", value, "key", key)
    for name, codes, rows_name, rows, scale_name, scale in (
        ("key_cache", key_cache, "key", key, "k_scale", k_scale),
        ("value_cache", value_cache, "value", value, "v_scale", v_scale),
    ):
        validate.cache(name, codes, rows_name, rows)
        validate.codes(name, codes, format, formats.STATIC)
        validate.given_scale(scale_name, scale, codes.shape[:3])
    validate.same_dtype("value_cache", value_cache, "key_cache", key_cache)
    validate.same_slots("value_cache", value_cache, "key_cache", key_cache)
    validate.slots(slot_mapping, key.shape[0])
    validate.head_sizes(key, value)


def _require_slots(key_cache: Any, slot_mapping: Any, check_slots: bool, **others: Any) -> None:
    if check_slots:
        validate.slot_values(slot_mapping, key_cache.shape[0] * key_cache.shape[1])


def _plan(
    key: Operand,
    value: Operand,
    key_cache: Operand,
    value_cache: Operand,
    k_scale: Operand,
    v_scale: Operand,
    slot_mapping: Operand,
    dtype: Any,
    format: Any,
    check_slots: bool,
    alignment: int,
) -> Plan | None:
    if slot_mapping.shape[0] == 0 or 0 in key_cache.shape[:3]:
        return None
    value_type = validate.float_type("key", key, dtype)
    code_type = validate.codes("key_cache", key_cache, format, formats.STATIC)
    types = {"value": value_type, "code": code_type, "slot": slot_mapping.dtype_name}
    scales = (
        validate.given_scale("k_scale", k_scale, key_cache.shape[:3]),
        validate.given_scale("v_scale", v_scale, value_cache.shape[:3]),
    )
    operands = key, value, key_cache, value_cache, *scales, slot_mapping, types, alignment
    return choose(VARIANTS, key.queue.sycl_device, value_type, key.shape[2], *operands)


@operation(
    _check,
    _plan,
    aligned="key value key_cache value_cache",
    may_overlap=[("key_cache", "value_cache")],
    before=_require_slots,
)
def reshape_and_cache_fp8(
    key: Array,
    value: Array,
    key_cache: Written,
    value_cache: Written,
    k_scale: Array,
    v_scale: Array,
    slot_mapping: Array,
    *,
    dtype: DType = None,
    format: Name = None,
    check_slots: bool = False,
) -> None:
    """Write row ``token`` of `key` and `value` as fp8 codes to slot ``slot_mapping[token]``, in place.

    ``code = fp8(x / scale)`` in float32, with IEEE division and ties to even, on every device. Numbers beyond
    the largest of the format, 448 or 57344, become that; NaN stays NaN.

    Parameters
    ----------
    key, value : [num_tokens, num_kv_heads, head_size], float32, float16 or bfloat16
        New rows of any strides; `value` may have a head size of its own.
    key_cache, value_cache : [num_blocks, block_size, num_kv_heads, head_size]
        Codes, changed in place: float8_e4m3fn, float8_e5m2, or uint8 that holds the bits of either.
    k_scale, v_scale : [1] or [num_kv_heads], float32
        One scale for all rows, or one for each head; read on the device. A scale that is not positive, not
        a normal number or not below 2**127 makes every code NaN.
    slot_mapping : [num_tokens], int32 or int64
        As for `reshape_and_cache`: negative slots skip, slots beyond the capacity are never written.
    dtype
        ``"bfloat16"`` where `key` and `value` are uint16 arrays that hold bfloat16 bits.
    format
        ``"fp8_e4m3"`` or ``"fp8_e5m2"``. By default the one that the dtype of `key_cache` says; uint8 arrays
        need it.
    check_slots
        Read the slots back first and raise where one is too large or appears twice.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `reshape_and_cache` does; nothing is then written.

    Notes
    -----
    `dequant_cache` and `paged_attention` take the scales as they are given here.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> key_cache, value_cache = kv.empty_cache(4, 16, 8, 128, dtype="float8_e4m3fn")
    >>> queue = key_cache.sycl_queue
    >>> key = dpnp.ones((2, 8, 128), dtype="float32", sycl_queue=queue)
    >>> scale = dpnp.asarray([0.25], dtype="float32", sycl_queue=queue)
    >>> slots = dpnp.asarray([17, -1], sycl_queue=queue)
    >>> kv.reshape_and_cache_fp8(key, 2 * key, key_cache, value_cache, scale, scale, slots, format="fp8_e4m3")
    >>> decoded = kv.dequant_cache(value_cache, scale, format="fp8_e4m3")
    >>> float(decoded[1, 1, 0, 0]), float(decoded.sum())
    (2.0, 2048.0)
    """
    __tracebackhide__ = True
    arrays = key, value, key_cache, value_cache, k_scale, v_scale, slot_mapping
    perform(reshape_and_cache_fp8, arrays, (dtype, format, check_slots))


VARIANTS = (
    Variant(cast_gpu, in_eights, in_lanes),
    Variant(cast_strided, anywhere, partial(in_groups, step="1")),
    Variant(cast_strided, anywhere, partial(in_groups, step="any")),
)
