"""dequant_cache: int8 codes and their scales as floating-point values again."""

from __future__ import annotations

from typing import Any, Callable

from ..kernels.dequantize import dequantize
from ..kernels.dequantize_any import dequantize_any
from ..kernels.dequantize_spread import dequantize_spread
from ..layout import contiguous_strides
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan, Result
from .declaration import Array, DType, Written
from .geometry import head_groups, row_groups
from .operation import operation


def _check(q: Operand, scales: Operand, dtype: Any, blocks: Operand | None, out: Operand | None) -> None:
    validate.codes("q", q)
    if len(q.shape) != 4:
        raise ValueError(
            f"`q` must have shape [num_blocks, block_size, num_kv_heads, head_size], got {list(q.shape)}"
        )
    validate.scales("scales", scales, "q", q)
    if blocks is not None:
        validate.blocks(blocks)
    if out is not None:
        validate.float_type("out", out, dtype)
    elif dtype is not None:
        validate.float_name("dtype", dtype)


def _result(q: Operand, dtype: Any, blocks: Operand | None, **others: Any) -> Result:
    leading = q.shape[:1] if blocks is None else blocks.shape
    return Result(
        (*leading, *q.shape[1:]), "float32" if dtype is None else validate.float_name("dtype", dtype)
    )


def _plan(
    q: Operand,
    scales: Operand,
    dtype: Any,
    blocks: Operand | None,
    out: Operand,
    alignment: tuple[int, int],
) -> Plan | None:
    if 0 in out.shape:
        return None
    chosen = None if blocks is None else validate.blocks(blocks)
    merged = validate.leading_axes_merged("out", out, len(out.shape) - 3)
    operands = (
        q,
        validate.scales("scales", scales, "q", q),
        chosen,
        merged,
        validate.float_type("out", out, dtype),
    )
    of_codes, of_out = alignment
    fast = _in_runs(*operands) if of_codes % 8 == 0 and of_out % 16 == 0 else None
    return fast or _any(*operands)


@operation(_check, _plan, result=_result, aligned=["q", "out"])
def dequant_cache(
    q: Array, scales: Array, *, dtype: DType = None, blocks: Array = None, out: Written = None
) -> Any:
    """Decode int8 codes: ``float32(code) * scale``, rounded once to `dtype`.

    Parameters
    ----------
    q : [num_blocks, block_size, num_kv_heads, head_size], int8
        Codes, of any strides.
    scales : [num_blocks * block_size, num_kv_heads], float32
        Scales by slot; ``[num_blocks, block_size, num_kv_heads]`` is accepted. A scale that is not finite
        gives NaN for its row.
    dtype
        ``"float32"`` (the default), ``"float16"`` or ``"bfloat16"``, whose bits come as uint16.
    blocks : [...], int32 or int64
        Decode only these blocks, such as a block table; result block ``n`` is block ``blocks[n]``, and
        zeros where `blocks` is negative or names no block. By default every block, in order.
    out
        Where to put the result, changed in place; by default a new array.

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


def _in_runs(
    codes: Operand, scales: Operand, chosen: Operand | None, out: Operand, value_type: str
) -> Plan | None:
    """Blocks of contiguous rows of whole runs; None if not so."""
    num_blocks, block_size, num_kv_heads, head_size = codes.shape
    kernel, unit, step, per_item = _kernel_of(codes.queue, value_type)
    rows = block_size * num_kv_heads
    if (
        head_size % step
        or codes.strides[0] % unit
        or codes.strides[1:] != contiguous_strides(codes.shape)[1:]
        or scales.strides[1:] != contiguous_strides(scales.shape)[1:]
        or out.strides != contiguous_strides(out.shape)
    ):
        return None
    strides = (codes.strides[0] // unit, scales.strides[0])
    blocks_out = out.shape[0]
    if chosen is None and strides == (rows * head_size // unit, rows):
        # All blocks in a row are one block to the kernel.
        rows, num_blocks, blocks_out = rows * num_blocks, 1, 1
    scalars = (
        int(chosen is not None),
        num_blocks,
        head_size // step,
        rows,
        chosen.strides[0] if chosen else 0,
        *strides,
    )
    types = {"value": value_type, "block": chosen.dtype_name if chosen else "int64"}
    (items, all_rows), (local_items, local_rows) = row_groups(codes.queue, -(-head_size // per_item), rows)
    groups = (items, all_rows, blocks_out), (local_items, local_rows, 1)
    return Plan(kernel, types, codes.queue, scalars, *groups)


def _kernel_of(queue: Any, value_type: str) -> tuple[Callable, int, int, int]:
    """The kernel for whole blocks that suits a device, and how many codes its strides, a row's length and
    an item count.
    """
    # A CPU converts neighbouring halves together, others one by one.
    if queue.sycl_device.is_cpu and value_type != "float16":
        return dequantize_spread, 1, 4, 4
    run = 4 if value_type == "float32" else 8
    return dequantize, run, run, 2 * run


def _any(codes: Operand, scales: Operand, chosen: Operand | None, out: Operand, value_type: str) -> Plan:
    """Any sizes and strides, a value an item."""
    num_slots = out.shape[0] * out.shape[1]
    if num_slots >= 2**32:
        raise ValueError(f"`out` must have fewer than 2**32 slots, got {num_slots}; decode fewer blocks")
    scalars = (
        int(chosen is not None),
        codes.shape[0],
        num_slots,
        codes.shape[1],
        codes.shape[3],
        chosen.strides[0] if chosen else 0,
        *codes.strides,
        *scales.strides,
        *out.strides,
    )
    types = {"value": value_type, "block": chosen.dtype_name if chosen else "int64"}
    groups = head_groups(codes.queue, codes.shape[3:], codes.shape[2], num_slots)
    return Plan(dequantize_any, types, codes.queue, scalars, *groups)
