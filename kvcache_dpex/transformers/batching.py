"""quantized_pool: ``model.generate_batch`` from a pool of codes and scales."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import cache, initialization
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.utils import find_head_dim

from .. import formats
from .. import torch as kv

SCALE_BYTES = 4


class QuantizedPool:
    """What `quantized_pool` yields: the pools that were made under it.

    Attributes
    ----------
    bytes_per_token, token_capacity : int
        Bytes that a token takes in all layers, and tokens of the pool that was made last; 0 before.
    """

    def __init__(self, format: str) -> None:
        self.format = format
        self.bytes_per_token = self.token_capacity = 0

    def __repr__(self) -> str:
        size = f"{self.token_capacity:,} tokens of {self.bytes_per_token:,} bytes"
        return f"<QuantizedPool: {self.format}, {size}>"


@contextlib.contextmanager
def quantized_pool(format: str) -> Iterator[QuantizedPool]:
    """Within it, ``model.generate_batch`` keeps keys and values as codes with a scale per token and head.

    Each row of its pool is ``[codes | float32 scale]``, so that transformers copies, shares and frees blocks
    as it does with its own. ``num_blocks`` of its configuration is memory, counted in blocks of the model's
    dtype: more tokens fit. Attention must be ``"sdpa"``, ``"paged|eager"``, or a flash-attention kernel. With
    that of this package (a repository that ``python -m kvcache_dpex hub`` writes) decoding reads the pool in
    place where transformers uses block tables, as on XPU; elsewhere rows are decoded for attention.

    Parameters
    ----------
    format
        ``"int8_per_token_head"`` or ``"fp8_per_token_head"``.

    Raises
    ------
    NotImplementedError
        While generating: the model has layers of other kinds than full attention.
    ValueError
        The format is unknown, or (while generating) the head size is not a multiple of 4.

    Examples
    --------
    >>> with quantized_pool("int8_per_token_head") as pool:  # doctest: +SKIP
    ...     outputs = model.generate_batch(inputs=[[1, 2, 3], [4, 5]], generation_config=config)
    >>> pool  # doctest: +SKIP
    <QuantizedPool: int8_per_token_head, 3,856 tokens of 12,240 bytes>
    """
    formats.quantized(format)
    pool = QuantizedPool(format)
    tables: list[dict] = [cache.ATTN_TYPE_TO_ALLOCATOR, initialization.ATTN_TYPE_TO_ALLOCATOR]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update(dict.fromkeys(table, _Refusing))
        table[FULL_ATTENTION] = type("Allocator", (_Allocator,), {"made_for": pool})
    try:
        yield pool
    finally:
        for table, old in zip(tables, before):
            table.update(old)


class _Allocator(FullAttentionCacheAllocator):
    """Rows of codes, each followed by its scale."""

    made_for: QuantizedPool

    def __init__(self, index: int, config: Any, **options: Any) -> None:
        size = find_head_dim(config)
        if size % SCALE_BYTES:
            raise ValueError(
                f"`config` must have heads of a multiple of {SCALE_BYTES} for a quantized pool, got {size}"
            )
        super().__init__(index, config, **options)
        self.code_type = getattr(torch, formats.quantized(self.made_for.format).dtype)

    @classmethod
    def get_bytes_per_page(
        cls, num_key_value_heads: int, head_dim: int, cache_dtype: torch.dtype, page_size: int
    ) -> int:
        return 2 * num_key_value_heads * (head_dim + SCALE_BYTES) * page_size

    def register_cache_tensor(self, *arguments: Any) -> None:
        # Bytes whose heads are as long as codes and scale, for the views that the parent makes.
        size, self.head_dim = self.head_dim, self.head_dim + SCALE_BYTES
        self.cache_dtype = torch.uint8
        super().register_cache_tensor(*arguments)
        self.head_dim = size
        self.made_for.bytes_per_token = self.bytes_per_block // self.tokens_per_page
        self.made_for.token_capacity = self.num_blocks * self.tokens_per_page

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        read_index: Tensor,
        write_index: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Write rows ``[tokens, num_kv_heads, head_size]``; return those of `read_index`, or else the new."""
        rows = self._kv_token_views[layer_idx]
        count = len(rows[1])  # the keys' view starts earlier, and ends with the values'
        (kq, ks), (vq, vs) = (self._codes_and_scales(each[:count, None]) for each in rows)
        format = self.made_for.format
        kv.reshape_and_cache_quant(key_states, value_states, kq, vq, ks, vs, write_index, format=format)
        if not read_index.numel():
            return key_states, value_states
        options: Any = {"dtype": key_states.dtype, "blocks": read_index, "format": format}
        return tuple(kv.dequant_cache(*each, **options).squeeze(1) for each in ((kq, ks), (vq, vs)))

    def get_cache_for_block_table(self, layer_idx: int) -> Any:
        """Pairs of codes and scales, which this package's `flash_attn_with_kvcache` takes."""
        return tuple(map(self._codes_and_scales, self._kv_page_views[layer_idx]))

    def _codes_and_scales(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = rows.split([self.head_dim, SCALE_BYTES], -1)
        return codes.view(self.code_type), scales.view(torch.float32).squeeze(-1)


class _Refusing(FullAttentionCacheAllocator):
    """In the place of allocators that a quantized pool does not have."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError(
            "a quantized pool has layers of full attention only, and this model has others; "
            "generate without it, or with model.generate and a PagedCache"
        )
