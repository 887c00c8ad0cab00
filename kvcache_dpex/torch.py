"""The operations on torch tensors, on the CPU and on Intel GPUs (XPU): no copy, and traced by torch.compile.

A launch takes the tensors' own memory. On the CPU an operation is done when its call returns; on an
XPU it is work on torch's current stream, like torch's own. XPU support is written from torch's sources
and has not yet run on an Intel GPU.

The operations are registered with torch (``torch.ops.kvcache_dpex``) with their mutated arguments and
fake implementations. They have no gradient: in grad mode an argument that requires one is refused.

torch knows no read-only memory: a tensor made by ``torch.from_numpy`` of a read-only array is written.
Where a compiled function itself takes views of a buffer, such as its K and V halves, let only the number
of tokens be dynamic, not the buffer: inductor loses the offset of a view of symbolic size (PyTorch issue
198068).
"""

from __future__ import annotations

import functools
import sys
import textwrap
from typing import Any, Callable, TypeVar

import torch
from torch import Tensor

from . import dispatch, formats
from .blocks.cache import PagedCache as _PagedCache
from .layout import cache_shapes, inline_spans
from .ops import attention, cast, dequantize, merge, moves, quantize, rotary, slots, spellings, write
from .ops.operation import Operation
from .runtime.launch.exchange import from_torch, to_torch
from .runtime.launch.tensors import dtype_of
from .torch_blocks import copy_blocks, gather_blocks, swap_blocks, zero_blocks
from .torch_flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = [
    "PagedCache",
    "append_paged_kv_cache",
    "concat_and_cache_mla",
    "copy_blocks",
    "dequant_cache",
    "dequant_caches",
    "empty_cache",
    "empty_quant_cache",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "from_torch",
    "gather_blocks",
    "get_batch_indices_positions",
    "merge_attention_states",
    "move_blocks",
    "paged_attention",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "reshape_and_cache_fp8",
    "reshape_and_cache_quant",
    "rotary_and_cache",
    "slot_mapping",
    "swap_blocks",
    "to_torch",
    "zero_blocks",
]


Function = TypeVar("Function", bound=Callable[..., Any])


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """A key cache and a value cache of zeros, ``[num_blocks, block_size, num_kv_heads, head_size]``.

    `dtype` is any of 1, 2, 4 or 8 bytes; `device` is by default the XPU, or the CPU where torch has none.

    Examples
    --------
    >>> key_cache, value_cache = empty_cache(256, 16, 8, 128, dtype=torch.bfloat16, device="cpu")
    >>> key_cache.shape
    torch.Size([256, 16, 8, 128])
    """
    shapes = cache_shapes(num_blocks, block_size, num_kv_heads, head_size, value_head_size)
    key_cache, value_cache = (_zeros(shape, dtype_of(dtype), device) for shape in shapes)
    return key_cache, value_cache


def empty_quant_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    value_head_size: int | None = None,
    format: str = "int8_per_token_head",
    scales_by_block: bool = False,
    inline: str | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caches of codes and their float32 scales ``[num_blocks * block_size, num_kv_heads]``, all zeros.

    Codes are int8, or float8_e4m3fn where `format` is ``"fp8_per_token_head"``. `scales_by_block` gives the
    scales the axes of the codes, ``[num_blocks, block_size, num_kv_heads]``, so that one index fits both.
    `inline` ``"NHD"`` or ``"HND"`` allocates once, rows of bytes ``[K codes | float32 | V codes | float32]``
    for each token and head, in this order within a block, of which the tensors are views.

    Examples
    --------
    >>> kq, vq, ks, vs = empty_quant_cache(256, 16, 8, 128, device="cpu")
    >>> kq.dtype, ks.shape
    (torch.int8, torch.Size([4096, 8]))
    """
    code_type = dtype_of(formats.quantized(format).dtype)
    if inline is not None:
        shapes = cache_shapes(num_blocks, block_size, num_kv_heads, head_size, value_head_size)
        block_bytes, spans = inline_spans(*shapes, inline)
        memory = _zeros((num_blocks * block_bytes,), torch.uint8, device)
        dtypes = code_type, code_type, torch.float32, torch.float32
        kq, vq, ks, vs = (
            memory.view(dtype).as_strided(span.shape, span.strides, first)
            for (span, first), dtype in zip(spans, dtypes)
        )
        return kq, vq, ks, vs
    kq, vq = empty_cache(
        num_blocks,
        block_size,
        num_kv_heads,
        head_size,
        value_head_size=value_head_size,
        dtype=code_type,
        device=device,
    )
    scales = kq.shape[:3] if scales_by_block else (num_blocks * block_size, num_kv_heads)
    ks, vs = (_zeros(tuple(scales), torch.float32, device) for _ in range(2))
    return kq, vq, ks, vs


def _on_tensors(declared: Function, example: str) -> Function:
    """An operation of the package on tensors; `example` takes the place of its examples."""
    operation: Operation = declared.operation  # type: ignore[attr-defined]

    plain = into = getattr(dispatch.registered, operation.name).default
    if operation.results:
        into = getattr(dispatch.registered, f"{operation.name}_out").default

    @functools.wraps(operation.function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        __tracebackhide__ = True
        if keywords.get("dtype") is not None:
            keywords["dtype"] = dtype_of(keywords["dtype"])
        results = {name: keywords.pop(name) for name in operation.results if name in keywords}
        results = {name: tensor for name, tensor in results.items() if tensor is not None}
        try:
            if results:
                return _written(operation, into, arguments, keywords, results)
            found = plain(*arguments, **keywords)
        except RuntimeError:
            _require_plain_tensors(operation, arguments, {**keywords, **results})
            raise
        if len(operation.results) < 2:
            return found
        return _asked_for(operation, keywords, dict(zip(operation.results, found)))

    documentation = (operation.function.__doc__ or "").partition("    Examples\n")[0]
    call.__doc__ = f"{documentation}    Examples\n    --------\n{textwrap.indent(example, ' ' * 4)}"
    call.__module__ = __name__
    del call.__wrapped__
    call.__signature__ = operation.signature  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _written(
    operation: Operation,
    into: Callable,
    arguments: tuple,
    keywords: dict[str, Any],
    results: dict[str, Any],
) -> Any:
    """Write results into tensors that are given, and into new ones for others that are asked for."""
    if any(name not in results for name in _names_asked_for(operation, keywords)):
        made = zip(operation.results, dispatch.empty_results(operation, arguments, keywords))
        results = {**{name: tensor for name, tensor in made if tensor is not None}, **results}
    into(*arguments, **keywords, **results)
    return _asked_for(operation, keywords, results)


def _asked_for(operation: Operation, keywords: dict[str, Any], results: dict[str, Tensor]) -> Any:
    """What a call returns of its results."""
    asked = [results[name] for name in _names_asked_for(operation, keywords)]
    return asked[0] if len(asked) == 1 else tuple(asked)


def _names_asked_for(operation: Operation, keywords: dict[str, Any]) -> list[str]:
    """Every result, but those whose option ``return_NAME`` is false."""
    declared = operation.signature.parameters
    return [
        name for name in operation.results if keywords.get(f"return_{name}", f"return_{name}" not in declared)
    ]


def _require_plain_tensors(operation: Operation, arguments: tuple, keywords: dict[str, Any]) -> None:
    """Say what torch's error means, where it comes from an argument that the dispatcher cannot take."""
    expected = sum(
        each.kind is each.POSITIONAL_OR_KEYWORD for each in operation.signature.parameters.values()
    )
    if len(arguments) > expected:
        message = f"{operation.name}() takes {expected} positional arguments but {len(arguments)} were given"
        if operation.name == "reshape_and_cache":
            message += "; vLLM's 8 arguments are those of reshape_and_cache_flash"
        raise TypeError(message) from None
    for array, tensor in dispatch.named(operation, arguments, keywords):
        if not isinstance(tensor, Tensor) and not (tensor is None and array.optional):
            name, kind = array.name, f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            if hasattr(tensor, "__sycl_usm_array_interface__"):
                remedy = f"kvcache_dpex.torch.to_torch({name}) shares its memory with torch"
            else:
                remedy = f"torch.as_tensor({name}) makes one"
            raise TypeError(f"`{name}` must be a torch.Tensor, got {kind}; {remedy}") from None
        if tensor is not None and tensor.layout is not torch.strided:
            raise TypeError(
                f"`{array.name}` must be dense, got {tensor.layout}; pass {array.name}.to_dense()"
            ) from None


reshape_and_cache = _on_tensors(
    write.reshape_and_cache,
    """\
>>> key_cache, value_cache = empty_cache(4, 16, 8, 128, device="cpu")
>>> key, value = torch.ones(2, 8, 128), torch.zeros(2, 8, 128)
>>> reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([17, -1]))
>>> key_cache.sum(), key_cache[1, 1].sum()
(tensor(1024.), tensor(1024.))
""",
)
reshape_and_cache_quant = _on_tensors(
    quantize.reshape_and_cache_quant,
    """\
>>> kq, vq, ks, vs = empty_quant_cache(4, 16, 1, 4, device="cpu")
>>> key = torch.tensor([[[-127.0, 0.5, 1.5, 63.0]]])
>>> reshape_and_cache_quant(key, key, kq, vq, ks, vs, torch.tensor([17]))
>>> kq[1, 1, 0], ks[17]
(tensor([-127,    0,    2,   63], dtype=torch.int8), tensor([1.]))
""",
)
reshape_and_cache_fp8 = _on_tensors(
    cast.reshape_and_cache_fp8,
    """\
>>> key_cache, value_cache = empty_cache(4, 16, 1, 4, dtype=torch.float8_e5m2, device="cpu")
>>> key, scale = torch.tensor([[[-3.0, 0.5, 1.1, 1e9]]]), torch.tensor([2.0])
>>> reshape_and_cache_fp8(key, key, key_cache, value_cache, scale, scale, torch.tensor([17]))
>>> dequant_cache(key_cache, scale)[1, 1, 0]
tensor([-3.0000e+00,  5.0000e-01,  1.0000e+00,  1.1469e+05])
""",
)
dequant_cache = _on_tensors(
    dequantize.dequant_cache,
    """\
>>> kq, vq, ks, vs = empty_quant_cache(4, 16, 8, 128, device="cpu")
>>> dequant_cache(kq, ks, dtype=torch.bfloat16, blocks=torch.tensor([2, 0])).shape
torch.Size([2, 16, 8, 128])
""",
)


def dequant_caches(
    kq: Tensor,
    vq: Tensor,
    ks: Tensor,
    vs: Tensor,
    *,
    dtype: Any = None,
    blocks: Any = None,
    format: Any = None,
) -> tuple[Tensor, Tensor]:
    """As `kvcache_dpex.dequant_caches`, on tensors."""
    options = {"dtype": dtype, "blocks": blocks, "format": format}
    return dequant_cache(kq, ks, **options), dequant_cache(vq, vs, **options)


paged_attention = _on_tensors(
    attention.paged_attention,
    """\
>>> key_cache, value_cache = empty_cache(4, 16, 8, 128, device="cpu")
>>> block_table = torch.tensor([[2, 0]], dtype=torch.int32)
>>> seq_lens = torch.tensor([17], dtype=torch.int32)
>>> query = torch.ones(1, 32, 128)
>>> out, lse = paged_attention(query, key_cache, value_cache, block_table, seq_lens, return_lse=True)
>>> out.shape, lse[0, 0].exp()  # 17 scores of 0
(torch.Size([1, 32, 128]), tensor(17.))
""",
)
merge_attention_states = _on_tensors(
    merge.merge_attention_states,
    """\
>>> out, lse = torch.ones(2, 4, 8), torch.zeros(2, 4)
>>> merged, _ = merge_attention_states(out, lse, 3 * out, lse)
>>> merged[0, 0, 0]
tensor(2.)
""",
)

move_blocks = _on_tensors(
    moves.move_blocks,
    """\
>>> key_cache, _ = empty_cache(4, 16, 8, 128, device="cpu")
>>> rows = torch.ones(2, 16, 8, 128)
>>> move_blocks(torch.tensor([1, 0]), key_cache, torch.tensor([3, 7]), source_0=rows)
>>> key_cache.sum((1, 2, 3))
tensor([    0.,     0.,     0., 16384.])
""",
)

slot_mapping = _on_tensors(
    slots.slot_mapping,
    """\
>>> table, positions = torch.tensor([[7, 2], [5, -1]]), torch.tensor([15, 16, 3, 16, -1])
>>> slot_mapping(table, positions, 16, query_start_loc=torch.tensor([0, 2, 5]))
tensor([127,  32,  83,  -1,  -1])
""",
)
get_batch_indices_positions = _on_tensors(
    slots.get_batch_indices_positions,
    """\
>>> get_batch_indices_positions(torch.tensor([0, 1, 3]), torch.tensor([5, 2]), 4)
(tensor([ 0,  1,  1, -1]), tensor([ 4,  0,  1, -1]))
""",
)
rotary_and_cache = _on_tensors(
    rotary.rotary_and_cache,
    """\
>>> key_cache, value_cache = empty_cache(4, 16, 1, 2, device="cpu")
>>> query, key, value = (torch.tensor([[[3.0, 4.0]]]) for _ in range(3))
>>> quarter_turns = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
>>> position, slot = torch.tensor([1]), torch.tensor([17])
>>> rotary_and_cache(position, query, key, value, quarter_turns, key_cache, value_cache, slot)
>>> query, key_cache[1, 1]
(tensor([[[-4.,  3.]]]), tensor([[-4.,  3.]]))
""",
)

# vLLM's names of dtypes, whose caches hold the values as they are.
_PLAIN = {
    "auto": None,
    "float": torch.float32,
    "float32": torch.float32,
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """vLLM's name and argument order for both writes.

    Parameters
    ----------
    key, value, key_cache, value_cache, slot_mapping
        As for `reshape_and_cache`.
    kv_cache_dtype
        ``"auto"``, ``"float"``, ``"half"``, ``"float16"`` or ``"bfloat16"`` copies; the cache must then have
        that dtype, and the scales are not looked at. ``"int8_per_token_head"`` and ``"fp8_per_token_head"``
        quantize. ``"fp8"``, which means ``"fp8_e4m3"``, and ``"fp8_e5m2"`` divide by the scales; the cache
        is of that dtype or uint8.
    k_scale, v_scale
        For formats ``per_token_head``, the caches of scales, ``[num_blocks, block_size, num_kv_heads]``
        float32, changed in place. For fp8 the scales, ``[1]`` or ``[num_kv_heads]`` float32.

    Raises
    ------
    ValueError
        `kv_cache_dtype` is none of these, or not the dtype of the cache.

    Examples
    --------
    >>> key_cache, value_cache = empty_cache(4, 16, 8, 128, dtype=torch.bfloat16, device="cpu")
    >>> key, one = torch.ones(2, 8, 128, dtype=torch.bfloat16), torch.ones(1)
    >>> slots = torch.tensor([17, -1])
    >>> reshape_and_cache_flash(key, key, key_cache, value_cache, slots, "bfloat16", one, one)
    >>> key_cache[1, 1].sum()
    tensor(1024., dtype=torch.bfloat16)
    """
    if kv_cache_dtype in formats.QUANTIZED:
        caches = key_cache, value_cache, k_scale, v_scale
        reshape_and_cache_quant(key, value, *caches, slot_mapping, format=kv_cache_dtype)
    elif kv_cache_dtype in formats.VLLM_STATIC:
        caches = key_cache, value_cache, k_scale, v_scale
        reshape_and_cache_fp8(key, value, *caches, slot_mapping, format=formats.VLLM_STATIC[kv_cache_dtype])
    elif kv_cache_dtype in _PLAIN:
        wanted = _PLAIN[kv_cache_dtype]
        if wanted is not None and key_cache.dtype != wanted:
            raise ValueError(
                f"`kv_cache_dtype` must be the dtype of `key_cache`, {key_cache.dtype}, or 'auto', got "
                f"{kv_cache_dtype!r}"
            )
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
    else:
        known = ", ".join(map(repr, (*_PLAIN, *formats.QUANTIZED, *formats.VLLM_STATIC)))
        raise ValueError(f"`kv_cache_dtype` must be one of {known}, got {kv_cache_dtype!r}")


dispatch.register_composite(
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype, Tensor(c!) k_scale, Tensor(d!) v_scale) -> ()",
    reshape_and_cache_flash,
)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Any,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor | None = None,
    kv_layout: str = "NHD",
) -> None:
    """As `kvcache_dpex.append_paged_kv_cache`, on tensors."""
    rows, places = (append_key, append_value), (batch_indices, positions, kv_indices, kv_indptr)
    spellings.append(slot_mapping, reshape_and_cache, rows, places, paged_kv_cache, kv_layout)


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scales: Tensor | None = None,
    dtype: Any = None,
    format: str | None = None,
) -> None:
    """As `kvcache_dpex.concat_and_cache_mla`, on tensors."""
    write, quantize = reshape_and_cache, reshape_and_cache_quant
    spellings.concat(write, quantize, kv_c, k_pe, kv_cache, slot_mapping, scales, dtype, format)


class PagedCache(_PagedCache):
    """`kvcache_dpex.PagedCache` with tensors.

    Examples
    --------
    >>> cache = PagedCache(
    ...     num_layers=1, num_blocks=8, block_size=4, num_kv_heads=2, head_size=8, device="cpu"
    ... )
    >>> rows = torch.ones(6, 2, 8)
    >>> with cache.step({"a": [11, 12, 13, 14, 15], "b": [21]}) as step:
    ...     step.append(0, rows, rows)
    ...     out = step.attend(0, rows)
    >>> out.shape
    torch.Size([6, 2, 8])
    """

    _operations = sys.modules[__name__]

    def _new_host_layer(self, num_blocks: int) -> tuple[Tensor, ...]:
        layer = self._new_layer(num_blocks, device="cpu")
        return tuple(each.pin_memory() for each in layer) if self.layers[0][0].is_xpu else layer


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device or ("xpu" if torch.xpu.is_available() else "cpu"))
