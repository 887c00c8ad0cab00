"""StaticPagedCache: a cache of fixed size, for compiled forward passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)

from .. import formats
from .. import torch as kv
from ..blocks.tiles import plural
from ..layout import whole_number
from .cache import PAGED


class StaticPagedLayer(CacheLayerMixin):
    """The blocks of one layer, those of each sequence in order."""

    is_compileable = True
    is_croppable = True
    is_sliding = False  # all tokens are kept; the mask knows the window

    def __init__(self, blocks_per_sequence: int, block_size: int, format: str | None) -> None:
        super().__init__()
        self.blocks_per_sequence, self.block_size, self.format = blocks_per_sequence, block_size, format
        self.capacity = blocks_per_sequence * block_size
        self.caches: Any = ()  # key_cache, value_cache, and their scales where they have some
        # A tensor, so that a graph does not depend on its value.
        self.cumulative_length: Any = torch.tensor(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, size = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        shape: Any = batch * self.blocks_per_sequence, self.block_size, heads, size
        options: Any = {"value_head_size": value_states.shape[3], "device": self.device}
        if self.format is None:
            self.caches = tuple(kv.empty_cache(*shape, dtype=self.dtype, **options))
        else:
            self.caches = tuple(kv.empty_quant_cache(*shape, format=self.format, **options))
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not is_compiling():
            for each in (*self.caches, self.cumulative_length):
                torch._dynamo.mark_static_address(each)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write new keys and values ``[batch, num_kv_heads, tokens, head_size]``; return all, decoded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, heads, count, _ = key_states.shape
        positions = torch.arange(count, device=self.device) + self.cumulative_length
        torch._assert_async(
            positions[-1] < self.capacity,
            f"the static cache holds {self.capacity} tokens: make it with a larger max_cache_len",
        )
        rows = torch.arange(batch, device=self.device)[:, None] * self.capacity
        slots = torch.where(positions < self.capacity, rows + positions, -1).flatten()
        key, value = (each.transpose(1, 2).flatten(0, 1) for each in (key_states, value_states))
        self.cumulative_length.add_(count)
        if self.format is None:
            key_cache, value_cache = whole = self.caches
            kv.reshape_and_cache(key, value, key_cache, value_cache, slots)
        else:
            kq, vq, ks, vs = self.caches
            kv.reshape_and_cache_quant(key, value, kq, vq, ks, vs, slots, format=self.format)
            options: Any = {"dtype": self.dtype, "format": self.format}
            whole = tuple(kv.dequant_cache(*each, **options) for each in ((kq, ks), (vq, vs)))
        return tuple(each.view(batch, self.capacity, heads, -1).transpose(1, 2) for each in whole)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be negative or 0, got {tokens_to_remove}")
        self.cumulative_length.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        batch = len(beam_idx)
        for each in self.caches:
            rows = each.view(torch.uint8).view(batch, -1)
            rows.copy_(rows[beam_idx.to(self.device)])

    def reset(self) -> None:
        self.cumulative_length.zero_()


class StaticPagedCache(Cache):
    """Plain or quantized keys and values in tensors of fixed size and place, for ``torch.compile``.

    A forward pass compiles to one graph. Each sequence has its blocks in order, for all of `max_cache_len`
    tokens, also in layers with a sliding window. Codes are decoded for attention, which may be any of
    transformers' own; to read blocks in place, use `PagedCache`, which cannot be compiled.

    Parameters
    ----------
    config
        The model's configuration.
    max_cache_len
        Tokens of a sequence that it has room for, rounded up to whole blocks.
    format : str, optional
        ``"int8_per_token_head"`` or ``"fp8_per_token_head"``; by default values are kept as they are.
    block_size
        Tokens of a block.

    Raises
    ------
    RuntimeError
        While generating: more tokens than `max_cache_len`. On a GPU it is torch's assertion on the device,
        which comes when the work is waited for. No other sequence is written to.

    Examples
    --------
    >>> cache = StaticPagedCache(model.config, 512, format="int8_per_token_head")  # doctest: +SKIP
    >>> model.generate(**inputs, cache=cache, max_new_tokens=20)  # doctest: +SKIP
    """

    def __init__(
        self, config: Any, max_cache_len: int, *, format: str | None = None, block_size: int = 16
    ) -> None:
        if format is not None:
            formats.quantized(format)
        self.format = format
        max_cache_len = whole_number("max_cache_len", max_cache_len, least=1)
        blocks = -(-max_cache_len // whole_number("block_size", block_size, least=1))
        layers = [
            StaticPagedLayer(blocks, block_size, format)
            if kind in PAGED
            else STATIC_LAYER_TYPE_MAPPING[kind](max_cache_len=max_cache_len, **options)
            for kind, options in zip(*get_layer_types_and_kwargs(config.get_text_config(decoder=True)))
        ]
        super().__init__(layers=layers)

    def bytes_allocated(self) -> int:
        """Bytes of all blocks, in all layers."""
        return sum(each.nbytes for layer in self.layers for each in getattr(layer, "caches", ()))

    def summary(self) -> str:
        """Format, size and bytes."""
        paged = [layer for layer in self.layers if isinstance(layer, StaticPagedLayer)]
        return (
            f"{self.format or 'values as they are'}, {plural(len(paged), 'layer')} of "
            f"{paged[0].capacity if paged else 0} tokens a sequence, {self.bytes_allocated():,} bytes"
        )

    def __repr__(self) -> str:
        return f"<StaticPagedCache: {self.summary()}>"
