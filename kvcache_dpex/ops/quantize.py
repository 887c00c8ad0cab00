"""reshape_and_cache_quant: new keys and values land as codes, with a scale for each token and head."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

from .. import formats
from ..kernels.quantize_cpu import quantize_cpu
from ..kernels.quantize_gpu import quantize_gpu
from ..kernels.quantize_strided import quantize_strided
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan
from .declaration import Array, DType, Name, Written
from .groups import CPU_VECTOR, group_limit, lane_groups, round_up
from .operation import operation, perform
from .plan import Variant, across_items, anywhere, choose, fills_vectors, merged, plan_of, within_items

MAX_LANES = 32


def _check(
    key: Operand,
    value: Operand,
    kq: Operand,
    vq: Operand,
    ks: Operand,
    vs: Operand,
    slot_mapping: Operand,
    dtype: Any,
    format: Any,
    check_slots: bool,
) -> None:
    validate.rows(key, value)
    validate.float_type("key", key, dtype)
    validate.same_dtype("value", value, "key", key)
    for name, codes, rows_name, rows in (("kq", kq, "key", key), ("vq", vq, "value", value)):
        validate.cache(name, codes, rows_name, rows)
        validate.codes(name, codes, format, formats.QUANTIZED)
    validate.same_dtype("vq", vq, "kq", kq)
    validate.same_slots("vq", vq, "kq", kq)
    validate.scales("ks", ks, "kq", kq)
    validate.scales("vs", vs, "vq", vq)
    validate.slots(slot_mapping, key.shape[0])
    validate.head_sizes(key, value)


def _require_slots(kq: Any, slot_mapping: Any, check_slots: bool, **others: Any) -> None:
    if check_slots:
        validate.slot_values(slot_mapping, kq.shape[0] * kq.shape[1])


def _plan(
    key: Operand,
    value: Operand,
    kq: Operand,
    vq: Operand,
    ks: Operand,
    vs: Operand,
    slot_mapping: Operand,
    dtype: Any,
    format: Any,
    check_slots: bool,
    alignment: int,
) -> Plan | None:
    if slot_mapping.shape[0] == 0 or 0 in kq.shape[:3]:
        return None
    value_type = validate.float_type("key", key, dtype)
    code_type = validate.codes("kq", kq, format)
    types = {"value": value_type, "code": code_type, "slot": slot_mapping.dtype_name}
    by_block = validate.scales("ks", ks, "kq", kq), validate.scales("vs", vs, "vq", vq)
    operands = key, value, kq, vq, *by_block, slot_mapping, types, alignment
    return choose(VARIANTS, key.queue.sycl_device, value_type, key.shape[2], *operands)


@operation(
    _check,
    _plan,
    aligned="key value kq vq",
    may_overlap=[("kq", "vq"), ("ks", "vs")],
    before=_require_slots,
)
def reshape_and_cache_quant(
    key: Array,
    value: Array,
    kq: Written,
    vq: Written,
    ks: Written,
    vs: Written,
    slot_mapping: Array,
    *,
    dtype: DType = None,
    format: Name = None,
    check_slots: bool = False,
) -> None:
    """Quantize row ``token`` of `key` and `value` into slot ``slot_mapping[token]``, in place.

    For each token and head, in float32 with IEEE division and ties to even, on every device:

    * ``int8_per_token_head``: ``scale = max|x| / 127``, ``code = clamp(rint(x / scale), -127, 127)``
    * ``fp8_per_token_head``: ``scale = max|x| / 448``, ``code = e4m3fn(clamp(x / scale, -448, 448))``

    A row of zeros, or one whose scale underflows to 0, gives codes 0 and scale 0. A row with NaN or
    infinity gives codes 0 and that as its scale, so that it decodes to NaN, and no other row does.

    Parameters
    ----------
    key, value : [num_tokens, num_kv_heads, head_size], float32, float16 or bfloat16
        New rows of any strides; `value` may have a head size of its own.
    kq, vq : [num_blocks, block_size, num_kv_heads, head_size], int8, float8_e4m3fn or uint8
        Codes, changed in place. uint8 arrays hold the bits of float8_e4m3fn.
    ks, vs : [num_blocks * block_size, num_kv_heads], float32
        Scales by slot, changed in place; ``[num_blocks, block_size, num_kv_heads]`` is accepted.
    slot_mapping : [num_tokens], int32 or int64
        As for `reshape_and_cache`: negative slots skip, slots beyond the capacity are never written.
    dtype
        ``"bfloat16"`` where `key` and `value` are uint16 arrays that hold bfloat16 bits.
    format
        ``"int8_per_token_head"`` or ``"fp8_per_token_head"``. By default the one that the dtype of `kq`
        says; uint8 arrays need it.
    check_slots
        Read the slots back first and raise where one is too large or appears twice.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `reshape_and_cache` does; nothing is then written.

    Notes
    -----
    The peers' formulas differ: vLLM rounds half away from zero by a reciprocal and floors the scale at
    1e-6. Readers that multiply code and scale take either.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> kq, vq, ks, vs = kv.empty_quant_cache(4, 16, 8, 128)
    >>> key = dpnp.ones((2, 8, 128), dtype="float32", sycl_queue=ks.sycl_queue)
    >>> slots = dpnp.asarray([17, -1], sycl_queue=ks.sycl_queue)
    >>> kv.reshape_and_cache_quant(key, 2 * key, kq, vq, ks, vs, slots)
    >>> int(dpnp.asnumpy(kq)[1, 1, 0, 0]), float(127 * ks[17, 0])
    (127, 1.0)
    """
    __tracebackhide__ = True
    arrays = key, value, kq, vq, ks, vs, slot_mapping
    perform(reshape_and_cache_quant, arrays, (dtype, format, check_slots))


def in_lanes(
    kernel: Callable,
    k: Operand,
    v: Operand,
    kq: Operand,
    vq: Operand,
    ks: Operand,
    vs: Operand,
    slots: Operand,
    types: dict[str, str],
    alignment: int,
) -> Plan | None:
    """Heads of whole sixteens in evenly spaced slots; None if not so."""
    caches = [merged(each, 0) for each in (kq, vq, ks, vs)]
    num_tokens, num_kv_heads, lanes = slots.shape[0], k.shape[1], k.shape[2] // 16
    if k.shape != v.shape or k.shape[2] % 16 or lanes > MAX_LANES or None in caches:
        return None
    return plan_of(
        kernel,
        types,
        lane_groups(k.queue, lanes, num_kv_heads, num_tokens),
        alignment,
        key=k,
        value=v,
        key_codes=caches[0],
        value_codes=caches[1],
        key_scales=caches[2],
        value_scales=caches[3],
        slot_mapping=slots,
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        num_slots=kq.shape[0] * kq.shape[1],
        lanes=lanes,
    )


def in_groups(
    kernel: Callable,
    k: Operand,
    v: Operand,
    kq: Operand,
    vq: Operand,
    ks: Operand,
    vs: Operand,
    slots: Operand,
    types: dict[str, str],
    alignment: int,
    *,
    step: str,
) -> Plan | None:
    """Any sizes and strides, a work-group for each token and head; with step 1, contiguous heads only."""
    if kq.shape[0] * kq.shape[1] >= 2**32:
        raise ValueError(
            "`kq` must have fewer than 2**32 slots unless its heads are contiguous multiples of 16 values, "
            f"got {kq.shape[0]} blocks of {kq.shape[1]}"
        )
    device, sizes = k.queue.sycl_device, (k.shape[2], v.shape[2])
    lanes = min(round_up(-(-max(sizes) // 8), CPU_VECTOR), group_limit(device))
    if max(sizes) > 8 * lanes:
        raise ValueError(
            f"`key` and `value` must have heads of at most {8 * lanes} values on {device.name}, "
            f"got {max(sizes)}"
        )
    if step == "1" and min(sizes) < lanes:
        return None
    return plan_of(
        kernel,
        {**types, "step": step},
        ((lanes, k.shape[1], slots.shape[0]), (lanes, 1, 1)),
        alignment,
        key=k,
        value=v,
        key_codes=kq,
        value_codes=vq,
        key_scales=ks,
        value_scales=vs,
        slot_mapping=slots,
        num_slots=kq.shape[0] * kq.shape[1],
        block_size=kq.shape[1],
        key_size=sizes[0],
        value_size=sizes[1],
        lanes=lanes,
    )


def _spread(device: Any, value_type: str, head_size: int) -> bool:
    return across_items(device, value_type) and fills_vectors(device, head_size, 16)


def in_eights(device: Any, value_type: str, head_size: int) -> bool:
    return within_items(device, value_type) and fills_vectors(device, head_size, 16)


VARIANTS = (
    Variant(quantize_cpu, _spread, in_lanes),
    Variant(quantize_gpu, in_eights, in_lanes),
    Variant(quantize_strided, anywhere, partial(in_groups, step="1")),
    Variant(quantize_strided, anywhere, partial(in_groups, step="any")),
)
