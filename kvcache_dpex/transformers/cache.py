"""PagedCache: keys and values of a batch in blocks, for transformers' ``past_key_values``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)

from .. import formats
from .. import torch as kv
from ..blocks.tiles import plural
from .tables import Step, Tables

ATTENTION = "kvcache_dpex"
HANDLE = "_kvcache_dpex_layer"
PAGED = ("full_attention", "sliding_attention", "chunked_attention")
# Their models change keys or values between the cache and attention.
_GATHERED = ("deepseek", "diffllama", "gemma3n", "moonshine")


class PagedLayer(CacheLayerMixin):
    """The blocks of one layer."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, tables: Tables, format: str | None, owner: PagedCache, gathered: bool) -> None:
        super().__init__()
        self.tables, self.format, self.owner, self.gathered = tables, format, owner, gathered
        self.is_sliding = tables.pool.sliding_window is not None
        self.caches: Any = ()  # key_cache, value_cache, and their scales where they have some
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        device = self.owner.device or key_states.device
        if key_states.device != torch.device(device):
            raise ValueError(f"`device` must be that of the layer, {key_states.device}, got {device}")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.heads, self.sizes = key_states.shape[1], (key_states.shape[3], value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take a batch's new keys and values, ``[batch, num_kv_heads, tokens, head_size]``.

        Where attention reads the blocks in place, they are written when it begins, for only then is their
        padding known.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.owner.in_place:
            # Views, so that attributes of the model's own tensors stay as they are.
            key_states, value_states = (each.view(each.shape) for each in (key_states, value_states))
            for each in (key_states, value_states):
                setattr(each, HANDLE, self)
            return key_states, value_states
        before = self.length
        step = self.write(key_states, value_states, None)
        window = self.tables.pool.sliding_window
        first = 0 if window is None else max(before - window + 1, 0)
        return tuple(self._gathered(which, step)[:, :, first : self.length] for which in (0, 1))

    def write(self, key_states: Tensor, value_states: Tensor, padding: list[int] | None) -> Step:
        """Write the new tokens to their blocks."""
        batch, _, count, _ = key_states.shape
        step = self.tables.advance(self.length, batch, count, padding, self.device)
        self._grow(self.tables.pool.num_blocks)
        if step.copies:
            kv.copy_blocks([self.caches], step.copies)
        key, value = (each.transpose(1, 2).flatten(0, 1) for each in (key_states, value_states))
        key_cache, value_cache, *scales = self.caches
        if self.format is None:
            kv.reshape_and_cache(key, value, key_cache, value_cache, step.slots)
        else:
            ks, vs = scales
            kv.reshape_and_cache_quant(
                key, value, key_cache, value_cache, ks, vs, step.slots, format=self.format
            )
        self.length += count
        return step

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: list[int] | None, **options: Any
    ) -> Any:
        """Write the new tokens and attend to all, in place; query and result are flat, by sequence."""
        step = self.write(key, value, padding)
        key_cache, value_cache, *scales = self.caches
        options |= dict(zip(("key_scales", "value_scales"), scales))
        return kv.paged_attention(
            query,
            key_cache,
            value_cache,
            step.block_table,
            step.seq_lens,
            query_start_loc=step.query_start_loc,
            format=self.format,
            **options,
        )

    def _grow(self, num_blocks: int) -> None:
        """Make the arrays as large as the pool."""
        have = len(self.caches[0]) if self.caches else 0
        if num_blocks == have:
            return
        shape: Any = num_blocks, self.tables.pool.block_size, self.heads, self.sizes[0]
        options: Any = {"value_head_size": self.sizes[1], "device": self.device}
        caches: Any
        if self.format is None:
            caches = kv.empty_cache(*shape, dtype=self.dtype, **options)
        else:
            caches = kv.empty_quant_cache(*shape, format=self.format, **options)
        for new, old in zip(caches, self.caches):
            new[: len(old)].view(torch.uint8).copy_(old.view(torch.uint8))
        self.caches = caches

    def _gathered(self, which: int, step: Step) -> Tensor:
        """The keys (0) or values (1) of all sequences, ``[batch, num_kv_heads, tokens, head_size]``."""
        blocks = step.block_table
        if self.format is None:
            rows = kv.gather_blocks(self.caches[which], blocks)
        else:
            rows = kv.dequant_cache(
                self.caches[which],
                self.caches[which + 2],
                dtype=self.dtype,
                blocks=blocks.flatten().clamp(min=0),
                format=self.format,
            )
        return rows.reshape(len(blocks), -1, self.heads, self.sizes[which]).transpose(1, 2)

    def bytes_of(self, num_blocks: int) -> int:
        """Memory of this many blocks."""
        return sum(each.nbytes for each in self.caches) // self.tables.pool.num_blocks * num_blocks

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        window = self.tables.pool.sliding_window
        first = 0 if window is None else max(self.length - window + 1, 0)
        return self.length - first + query_length, first

    def get_max_length(self) -> int:
        return self.tables.pool.sliding_window or -1

    def reset(self) -> None:
        self.length = 0


class PagedCache(Cache):
    """Keys and values in blocks, plain or quantized, as `past_key_values` of ``model.generate``.

    Beams and returned sequences share the blocks of their common beginning, and a block is copied when one of
    them writes to it. Layers with a sliding window give back the blocks that it has left behind. Layers that
    keep a state instead of keys and values (linear attention) have transformers' own.

    Parameters
    ----------
    config
        The model's configuration. With ``attn_implementation="kvcache_dpex"`` attention reads the blocks in
        place; with any other, and for models that change keys or values after the cache (such as MLA), they
        are gathered for it.
    format : str, optional
        ``"int8_per_token_head"`` or ``"fp8_per_token_head"``; by default values are kept as they are.
    block_size
        Tokens of a block.
    num_blocks
        Blocks of each pool; by default a pool grows.
    device
        Where the cache is, by default where the model's keys are.

    Raises
    ------
    kvcache_dpex.OutOfBlocks
        While generating: the pool is full. Nothing was written for the tokens in question.

    Examples
    --------
    >>> cache = PagedCache(model.config, format="int8_per_token_head")  # doctest: +SKIP
    >>> model.generate(**inputs, cache=cache, max_new_tokens=20)  # doctest: +SKIP
    """

    def __init__(
        self,
        config: Any,
        *,
        format: str | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if format is not None:
            formats.quantized(format)
        self.config = config.get_text_config(decoder=True)
        self.format, self.device = format, device
        self.tables: dict[int | None, Tables] = {}
        model = str(getattr(self.config, "model_type", ""))
        gathered = getattr(self.config, "kv_lora_rank", None) is not None or model.startswith(_GATHERED)
        layers: list[Any] = []
        for kind, options in zip(*get_layer_types_and_kwargs(self.config)):
            if kind not in PAGED:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**options))
                continue
            window = options.get("sliding_window")
            if window not in self.tables:
                self.tables[window] = Tables(block_size, window, num_blocks)
            layers.append(PagedLayer(self.tables[window], format, self, gathered))
        super().__init__(layers=layers)

    @property
    def in_place(self) -> bool:
        """Whether attention reads the blocks where they are."""
        return self.config._attn_implementation == ATTENTION and not any(each.gathered for each in self.paged)

    @property
    def paged(self) -> list[PagedLayer]:
        """The layers that keep their keys and values in blocks."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def _others(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PagedLayer)]

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of every sequence; `tokens_to_remove` is minus their number."""
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be negative or 0, got {tokens_to_remove}")
        for tables in self.tables.values():
            tables.crop(-tokens_to_remove)
        for layer in self.paged:
            layer.length = layer.tables.length
        for layer in self._others:
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these beams."""
        self._select(beam_idx.tolist())
        for layer in self._others:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        rows = next(iter(self.tables.values())).rows if self.tables else []
        self._select(torch.arange(len(rows))[indices.cpu()].tolist())
        for layer in self._others:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch, sharing its blocks."""
        rows = next(iter(self.tables.values())).rows if self.tables else []
        self._select([row for row in range(len(rows)) for _ in range(repeats)])
        for layer in self._others:
            layer.batch_repeat_interleave(repeats)

    def _select(self, rows: list[int]) -> None:
        for tables in self.tables.values():
            tables.select(rows)

    def activate_past_recording(self) -> None:
        """Keep what a sliding window leaves behind until the next `crop`."""
        for tables in self.tables.values():
            tables.recording = True
        super().activate_past_recording()

    def reset(self) -> None:
        """Forget all sequences and keep the memory."""
        for tables in self.tables.values():
            tables.reset()
        super().reset()

    def bytes_in_use(self) -> int:
        """Bytes of the blocks that sequences hold, in all layers."""
        return sum(layer.bytes_of(layer.tables.pool.stats().used) for layer in self.paged if layer.caches)

    def bytes_allocated(self) -> int:
        """Bytes of all blocks, in all layers."""
        return sum(each.nbytes for layer in self.paged for each in layer.caches)

    def summary(self) -> str:
        """Blocks, tokens and bytes, one line for each pool."""
        lines = [
            f"{self.format or 'values as they are'}, {'read in place' if self.in_place else 'gathered'}, "
            f"{self.bytes_in_use():,} of {self.bytes_allocated():,} bytes in use"
        ]
        for window, tables in self.tables.items():
            layers = sum(layer.tables is tables for layer in self.paged)
            stats = tables.pool.stats()
            kind = "full attention" if window is None else f"window of {window}"
            sequences = plural(len(tables.rows), "sequence")
            lines.append(
                f"{plural(layers, 'layer')}, {kind}: {sequences} of {tables.length} tokens, "
                f"{stats.used} of {stats.num_blocks} blocks of {tables.pool.block_size}"
            )
        if self._others:
            lines.append(f"{plural(len(self._others), 'layer')} without blocks")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<PagedCache: {self.summary()}>".replace("\n", "; ")
