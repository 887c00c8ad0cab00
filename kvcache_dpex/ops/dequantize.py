"""dequant_cache: int8 codes and their scales as floating-point values again."""

from __future__ import annotations

from typing import Any, Callable

from ..kernels.dequantize_cpu import dequantize_cpu
from ..kernels.dequantize_gpu import dequantize_gpu
from ..kernels.dequantize_strided import dequantize_strided
from ..runtime.launch import arrays, launch
from ..runtime.launch.arrays import Operand, read, read_output
from . import validate
from .groups import head_groups, row_groups
from .plan import Variant, across_items, anywhere, choose, launch_of, merged, within_items

_launches: dict[tuple, Callable[[tuple[int, ...], Any], None]] = {}


def dequant_cache(
    q: Any,
    scales: Any,
    *,
    dtype: Any = None,
    out: Any = None,
    blocks: Any = None,
    format: str | None = None,
) -> Any:
    """Decode int8 or fp8 codes: ``float32(code) * scale``, rounded once to `dtype`.

    Parameters
    ----------
    q : [num_blocks, block_size, num_kv_heads, head_size], int8, float8_e4m3fn or uint8
        Codes, of any strides. uint8 arrays hold the bits of float8_e4m3fn.
    scales : [num_blocks * block_size, num_kv_heads], float32
        Scales by slot; ``[num_blocks, block_size, num_kv_heads]`` is accepted. A scale that is not finite
        gives NaN for its row.
    dtype
        ``"float32"`` (the default), ``"float16"`` or ``"bfloat16"``, whose bits come as uint16.
    out
        Where to put the result, changed in place; by default a new array.
    blocks : [...], int32 or int64
        Decode only these blocks, such as a block table; result block ``n`` is block ``blocks[n]``, and
        zeros where `blocks` is negative or names no block. By default every block, in order.
    format
        ``"int8_per_token_head"`` or ``"fp8_per_token_head"``. By default the one that the dtype of `q` says;
        uint8 arrays need it.

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
    launch.refuse_after_fork()
    q_at, codes = read(q, "q")
    scales_at, scale_fields = read(scales, "scales")
    blocks_at, chosen = (q_at, None) if blocks is None else read(blocks, "blocks")
    if out is None:
        wanted = "float32" if dtype is None else validate.float_name("dtype", dtype)
        shape = (codes[0][:1] if chosen is None else chosen[0]) + codes[0][1:]
        out = arrays.empty_like(q, shape, wanted)
    out_at, result = read_output(out, "out")
    geometry = (codes, scale_fields, chosen, result, dtype, format, (q_at | out_at) % 16)
    prepared = _launches.get(geometry)
    if prepared is None:
        launch.make_room(_launches)
        prepared = _launches[geometry] = _prepare(*geometry)
    prepared((q_at, scales_at, blocks_at, out_at), (q, scales, blocks, out))
    return out


def _prepare(
    q: tuple, scales: tuple, blocks: tuple | None, out: tuple, dtype: Any, format: Any, alignment: int
) -> Callable[[tuple[int, ...], Any], None]:
    """The launch for one geometry, once it is known to be right."""
    codes, result = Operand(*q), Operand(*out)
    code_type = validate.codes("q", codes, format)
    if len(codes.shape) != 4:
        raise ValueError(
            f"`q` must have shape [num_blocks, block_size, num_kv_heads, head_size], got {list(codes.shape)}"
        )
    scale = validate.scales("scales", Operand(*scales), "q", codes)
    value_type = validate.float_type("out", result, dtype)
    chosen = None if blocks is None else validate.blocks(Operand(*blocks))
    leading = codes.shape[:1] if blocks is None else Operand(*blocks).shape
    if result.shape != (*leading, *codes.shape[1:]):
        raise ValueError(f"`out` must have shape {[*leading, *codes.shape[1:]]}, got {list(result.shape)}")
    validate.distinct("out", result)
    result = validate.leading_axes_merged("out", result, len(leading))
    validate.same_queue(
        q=codes, scales=Operand(*scales), out=result, **({"blocks": chosen} if chosen else {})
    )
    if 0 in result.shape:
        return launch.nothing
    types = {"value": value_type, "code": code_type, "block": chosen.dtype_name if chosen else "int64"}
    return plan(codes, scale, chosen, result, types, alignment or 16)


def plan(
    codes: Operand,
    scales: Operand,
    chosen: Operand | None,
    out: Operand,
    types: dict[str, str],
    alignment: int,
) -> launch.Launch:
    """The launch of the kernel that suits the device and the operands."""
    operands = codes, scales, chosen, out, types, alignment
    return choose(VARIANTS, codes.queue.sycl_device, types["value"], codes.shape[3], *operands)


def _whole_rows(
    kernel: Callable,
    codes: Operand,
    scales: Operand,
    chosen: Operand | None,
    out: Operand,
    types: dict[str, str],
    alignment: int,
) -> launch.Launch | None:
    """Blocks of evenly spaced rows of contiguous values; None if not so."""
    operands = [merged(each, 1) for each in (codes, scales, out)]
    if None in operands:
        return None
    if chosen is None:
        joined = [merged(each, 0) for each in operands]
        if None not in joined:  # all blocks as one
            operands = [_as_one_block(each) for each in joined if each]
    codes, scales, out = (each for each in operands if each)
    head_size, per_item = codes.shape[2], 4 if kernel is dequantize_cpu else 16
    if head_size % 4:
        return None
    items, local = row_groups(codes.queue, -(-head_size // per_item), codes.shape[1])
    return launch_of(
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
) -> launch.Launch | None:
    """Any sizes and strides, a value an item."""
    num_slots = out.shape[0] * out.shape[1]
    if num_slots > 2**32:
        raise ValueError(f"`out` must have at most 2**32 slots, got {num_slots}; decode fewer blocks")
    return launch_of(
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


VARIANTS = (
    Variant(dequantize_cpu, across_items, _whole_rows),
    Variant(dequantize_gpu, within_items, _whole_rows),
    Variant(dequantize_strided, anywhere, _strided),
)
