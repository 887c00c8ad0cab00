"""dequant_cache: codes and their scales as floating-point values again."""

from __future__ import annotations

from typing import Any, Callable

from ..kernels.dequantize_cpu import dequantize_cpu
from ..kernels.dequantize_gpu import dequantize_gpu
from ..kernels.dequantize_gpu_float32 import dequantize_gpu_float32
from ..kernels.dequantize_strided import dequantize_strided
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan, Result
from .declaration import Array, DType, Name, Written
from .groups import head_groups, row_groups
from .operation import operation, perform
from .plan import Variant, across_items, anywhere, choose, merged, plan_of, within_items


def _check(
    q: Operand, scales: Operand, dtype: Any, blocks: Operand | None, out: Operand | None, format: Any
) -> None:
    validate.codes("q", q, format)
    if len(q.shape) != 4:
        raise ValueError(
            f"`q` must have shape [num_blocks, block_size, num_kv_heads, head_size], got {list(q.shape)}"
        )
    validate.any_scales("scales", scales, "q", q)
    if blocks is not None:
        validate.blocks(blocks)
    if out is not None:
        validate.float_type("out", out, dtype)
    elif dtype is not None:
        validate.float_name("dtype", dtype)


def _results(q: Operand, dtype: Any, blocks: Operand | None, **others: Any) -> dict[str, Result]:
    leading = q.shape[:1] if blocks is None else blocks.shape
    name = "float32" if dtype is None else validate.float_name("dtype", dtype)
    return {"out": Result((*leading, *q.shape[1:]), name)}


def _plan(
    q: Operand,
    scales: Operand,
    dtype: Any,
    blocks: Operand | None,
    out: Operand,
    format: Any,
    alignment: int,
) -> Plan | None:
    if 0 in out.shape:
        return None
    chosen = None if blocks is None else validate.blocks(blocks)
    value_type = validate.float_type("out", out, dtype)
    types = {
        "value": value_type,
        "code": validate.codes("q", q, format),
        "block": chosen.dtype_name if chosen else "int64",
    }
    scales = validate.any_scales("scales", scales, "q", q)
    out = validate.leading_axes_merged("out", out, len(out.shape) - 3)
    operands = q, scales, chosen, out, types, alignment
    return choose(VARIANTS, q.queue.sycl_device, value_type, q.shape[3], *operands)


@operation(_check, _plan, results=_results, aligned="q out")
def dequant_cache(
    q: Array,
    scales: Array,
    *,
    dtype: DType = None,
    blocks: Array = None,
    out: Written = None,
    format: Name = None,
) -> Any:
    """Decode codes: ``float32(code) * scale``, rounded once to `dtype`.

    Parameters
    ----------
    q : [num_blocks, block_size, num_kv_heads, head_size], int8, float8_e4m3fn, float8_e5m2 or uint8
        Codes, of any strides. uint8 arrays hold the bits of either float8.
    scales : [num_blocks * block_size, num_kv_heads], float32
        Scales by slot; ``[num_blocks, block_size, num_kv_heads]`` is accepted, and so are ``[num_kv_heads]``
        for one scale a head and ``[1]`` for one in all. A scale that is not finite gives NaN for its rows.
    dtype
        ``"float32"`` (the default), ``"float16"`` or ``"bfloat16"``, whose bits come as uint16.
    blocks : [...], int32 or int64
        Decode only these blocks, such as a block table; result block ``n`` is block ``blocks[n]``, and
        zeros where `blocks` is negative or names no block. By default every block, in order.
    out
        Where to put the result, changed in place; by default a new array.
    format
        ``"int8_per_token_head"``, ``"fp8_per_token_head"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``. By default
        what the dtype of `q` says; uint8 arrays need it.

    Returns
    -------
    array : [*blocks.shape, block_size, num_kv_heads, head_size]
        `out`, or a new array on the queue of `q`.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or queue does not fit; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> kq, vq, ks, vs = kv.empty_quant_cache(4, 16, 8, 128)
    >>> kv.dequant_cache(kq, ks, dtype="float16").shape
    (4, 16, 8, 128)
    """
    __tracebackhide__ = True
    return perform(dequant_cache, (q, scales, blocks, out), (dtype, format))


def dequant_caches(
    kq: Any, vq: Any, ks: Any, vs: Any, *, dtype: Any = None, blocks: Any = None, format: Any = None
) -> tuple[Any, Any]:
    """Decode keys and values, in the order in which `empty_quant_cache` gives their codes and scales.

    Parameters
    ----------
    kq, vq, ks, vs
        Codes and scales of keys and values.
    dtype, blocks, format
        As for `dequant_cache`.

    Returns
    -------
    keys, values : [*blocks.shape, block_size, num_kv_heads, head_size]

    Raises
    ------
    TypeError, ValueError
        As for `dequant_cache`.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> caches = kv.empty_quant_cache(4, 16, 8, 128)
    >>> keys, values = kv.dequant_caches(*caches, dtype="float16")
    >>> keys.shape
    (4, 16, 8, 128)
    """
    options = {"dtype": dtype, "blocks": blocks, "format": format}
    return dequant_cache(kq, ks, **options), dequant_cache(vq, vs, **options)


def _whole_rows(
    kernel: Callable,
    codes: Operand,
    scales: Operand,
    chosen: Operand | None,
    out: Operand,
    types: dict[str, str],
    alignment: int,
) -> Plan | None:
    """Blocks of evenly spaced rows of contiguous values; None if not so."""
    operands = [merged(each, 1) for each in (codes, scales, out)]
    if None in operands:
        return None
    if chosen is None:
        joined = [merged(each, 0) for each in operands]
        if None not in joined:  # all blocks as one
            operands = [_as_one_block(each) for each in joined if each]
    codes, scales, out = (each for each in operands if each)
    head_size, per_item = codes.shape[2], PER_ITEM[kernel]
    if head_size % 4:
        return None
    items, local = row_groups(codes.queue, -(-head_size // per_item), codes.shape[1])
    return plan_of(
        kernel,
        types,
        ((*items, out.shape[0]), (*local, 1)),
        alignment,
        codes=codes,
        scales=scales,
        blocks=chosen,
        out=out,
        listed=int(chosen is not None),
        num_blocks=codes.shape[0],
        rows=codes.shape[1],
        head_size=head_size,
    )


def _as_one_block(operand: Operand) -> Operand:
    return operand._replace(shape=(1, *operand.shape), strides=(0, *operand.strides))


def _strided(
    kernel: Callable,
    codes: Operand,
    scales: Operand,
    chosen: Operand | None,
    out: Operand,
    types: dict[str, str],
    alignment: int,
) -> Plan | None:
    """Any sizes and strides, a value an item."""
    num_slots = out.shape[0] * out.shape[1]
    if num_slots >= 2**32:
        raise ValueError(f"`out` must have fewer than 2**32 slots, got {num_slots}; decode fewer blocks")
    return plan_of(
        kernel,
        types,
        head_groups(codes.queue, codes.shape[3:], codes.shape[2], num_slots),
        alignment,
        codes=codes,
        scales=scales,
        blocks=chosen,
        out=out,
        listed=int(chosen is not None),
        num_blocks=codes.shape[0],
        num_slots=num_slots,
        block_size=codes.shape[1],
        head_size=codes.shape[3],
    )


# Values that an item decodes.
PER_ITEM = {dequantize_cpu: 4, dequantize_gpu_float32: 8, dequantize_gpu: 16}
VARIANTS = (
    Variant(dequantize_cpu, across_items, _whole_rows),
    Variant(dequantize_gpu_float32, within_items, _whole_rows),
    Variant(dequantize_gpu, within_items, _whole_rows),
    Variant(dequantize_strided, anywhere, _strided),
)
