"""dequant_cache: int8 codes and their scales as floating-point values again."""

from __future__ import annotations

from typing import Any, Callable

from ..kernels.dequantize import dequantize
from ..kernels.dequantize_any import dequantize_any
from ..kernels.dequantize_spread import dequantize_spread
from ..layout import contiguous_strides
from ..runtime.compile import edits, store
from ..runtime.launch import arrays, launch
from ..runtime.launch.arrays import Operand, read, read_output
from . import validate
from .geometry import head_groups, row_groups

_launches: dict[tuple, Callable[[tuple[int, ...], Any], None]] = edits.cache()


def dequant_cache(q: Any, scales: Any, *, dtype: Any = None, out: Any = None, blocks: Any = None) -> Any:
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
    out
        Where to put the result, changed in place; by default a new array.
    blocks : [...], int32 or int64
        Decode only these blocks, such as a block table; result block ``n`` is block ``blocks[n]``, and
        zeros where `blocks` is negative or names no block. By default every block, in order.

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
    geometry = (codes, scale_fields, chosen, result, dtype, q_at % 8 != 0 or out_at % 16 != 0)
    prepared = _launches.get(geometry)
    if prepared is None:
        launch.make_room(_launches)
        prepared = _launches[geometry] = _prepare(*geometry)
    prepared((q_at, scales_at, blocks_at, out_at), (q, scales, blocks, out))
    return out


def _prepare(
    q: tuple, scales: tuple, blocks: tuple | None, out: tuple, dtype: Any, misaligned: bool
) -> Callable[[tuple[int, ...], Any], None]:
    """The launch for one geometry, once it is known to be right."""
    codes, result = Operand(*q), Operand(*out)
    validate.codes("q", codes)
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
    fast = None if misaligned else _in_runs(codes, scale, chosen, result, value_type)
    return fast or _any(codes, scale, chosen, result, value_type)


def _in_runs(
    codes: Operand, scales: Operand, chosen: Operand | None, out: Operand, value_type: str
) -> launch.Launch | None:
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
    module = store.load(kernel, value=value_type, block=chosen.dtype_name if chosen else "int64")
    (items, all_rows), (local_items, local_rows) = row_groups(codes.queue, -(-head_size // per_item), rows)
    return launch.Launch(
        module, codes.queue, scalars, (items, all_rows, blocks_out), (local_items, local_rows, 1)
    )


def _kernel_of(queue: Any, value_type: str) -> tuple[Callable, int, int, int]:
    """The kernel for whole blocks that suits a device, and how many codes its strides, a row's length and
    an item count.
    """
    # A CPU converts neighbouring halves together, others one by one.
    if queue.sycl_device.is_cpu and value_type != "float16":
        return dequantize_spread, 1, 4, 4
    run = 4 if value_type == "float32" else 8
    return dequantize, run, run, 2 * run


def _any(
    codes: Operand, scales: Operand, chosen: Operand | None, out: Operand, value_type: str
) -> launch.Launch:
    """Any sizes and strides, a value an item."""
    num_slots = out.shape[0] * out.shape[1]
    if num_slots > 2**32:
        raise ValueError(f"`out` must have at most 2**32 slots, got {num_slots}; decode fewer blocks")
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
    module = store.load(dequantize_any, value=value_type, block=chosen.dtype_name if chosen else "int64")
    groups = head_groups(codes.queue, codes.shape[3:], codes.shape[2], num_slots)
    return launch.Launch(module, codes.queue, scalars, *groups)
