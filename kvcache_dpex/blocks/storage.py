"""The arrays of a `PagedCache`, and what can be read of it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from .. import formats
from ..layout import cache_shapes, whole_number
from ..runtime.launch import arrays
from . import on_arrays
from .inventory import Inventory
from .pool import BlockPool
from .sequence import SequenceState
from .step import Step
from .tiles import in_units, plural


class Storage:
    """The part of `PagedCache` that holds arrays."""

    _operations: Any = on_arrays

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        value_head_size: int | None = None,
        format: str = "float32",
        inline: str | None = None,
        sliding_window: int | None = None,
        num_host_blocks: int = 0,
        device: Any = None,
    ) -> None:
        __tracebackhide__ = True
        known = {name: formats.PLAIN[name] for name in ("float32", "float16", "bfloat16")}
        known.update(formats.QUANTIZED)
        if format not in known:
            raise ValueError(f"`format` must be one of {', '.join(known)}, got {format!r}")
        self.num_layers = whole_number("num_layers", num_layers, least=1)
        self.format, self._format, self._quantized = format, known[format], format in formats.QUANTIZED
        if inline is not None and not self._quantized:
            raise ValueError(
                f"`inline` must be None for format {format!r}, which has no scales, got {inline!r}"
            )
        self._inline = inline
        shapes = cache_shapes(num_blocks, block_size, num_kv_heads, head_size, value_head_size)
        whole_number("num_blocks", num_blocks, least=1)
        _, self.block_size, self.num_kv_heads, self.head_size = shapes[0]
        self.value_head_size = shapes[1][3]
        self.pool = BlockPool(num_blocks, block_size, sliding_window=sliding_window)
        self.layers = [self._new_layer(self.pool.num_blocks, device=device) for _ in range(self.num_layers)]
        num_host_blocks = whole_number("num_host_blocks", num_host_blocks, least=0)
        self._host_blocks = Inventory(num_host_blocks)
        self._host_layers = [self._new_host_layer(num_host_blocks) for _ in self.layers]
        self._swapped: dict[Hashable, tuple[SequenceState, list[int]]] = {}
        self._open: Step | None = None

    def rows(self, layer: int, sequence: Hashable, *, dtype: Any = None) -> tuple[Any, Any]:
        """Keys and values of a sequence in one layer, copied out of the blocks.

        Parameters
        ----------
        layer : int
            ``0 <= layer < num_layers``.
        sequence : hashable
            A sequence of the cache.
        dtype
            Where the cache keeps codes, what they are decoded to, as for `dequant_cache`.

        Returns
        -------
        key, value : [num_tokens, num_kv_heads, head_size]
            Zeros for the tokens whose blocks a window has released.
        """
        key_cache, value_cache, *scales = self._layer(layer)
        if dtype is not None and not self._quantized:
            raise ValueError(f"`dtype` must be None for format {self.format!r}, got {dtype!r}")
        length, table = self.pool.length(sequence), self.pool.block_table(sequence)
        blocks = self._on_device(np.array(table, np.int64))
        if self._quantized:
            options = {"dtype": dtype, "blocks": blocks, "format": self.format}
            found = [
                self._operations.dequant_cache(codes, of_codes, **options)
                for codes, of_codes in zip((key_cache, value_cache), scales)
            ]
        else:
            found = [self._operations.gather_blocks(each, blocks) for each in (key_cache, value_cache)]
        key, value = (each.reshape(-1, *each.shape[2:])[:length] for each in found)
        return key, value

    def length(self, sequence: Hashable) -> int:
        """Number of tokens of a sequence."""
        return self.pool.length(sequence)

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """Names of the sequences, the oldest first."""
        return self.pool.sequences

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers, scales included."""
        row = self._format.row_bytes(self.head_size) + self._format.row_bytes(self.value_head_size)
        return self.num_layers * self.block_size * self.num_kv_heads * row

    def __repr__(self) -> str:
        stats = self.pool.stats()
        return (
            f"<PagedCache: {plural(self.num_layers, 'layer')} of {self.format}, {stats.used} of "
            f"{stats.num_blocks} blocks used by {plural(stats.sequences, 'sequence')}>"
        )

    def __rich__(self) -> Any:
        from .map import text_map

        return text_map(self.pool, "PagedCache", self._summary())

    def _repr_html_(self) -> str:
        from .map import html_map

        return html_map(self.pool, "PagedCache", self._summary())

    def _summary(self) -> list[str]:
        """Bytes in this format beside those of plain values, and what is in host memory."""
        used, own = self.pool.stats().used, self.bytes_per_block
        lines = [
            f"{plural(self.num_layers, 'layer')} of {self.format}: {in_units(used * own)} of "
            f"{in_units(self.pool.num_blocks * own)} used"
        ]
        if self._quantized:
            plain = formats.PLAIN["float16"].row_bytes(self.head_size + self.value_head_size)
            plain *= self.num_layers * self.block_size * self.num_kv_heads
            lines[0] += f"; float16 would take {plain / own:.2f} times as much"
        num_host_blocks = len(self._host_blocks.references)
        if num_host_blocks:
            taken = num_host_blocks - self._host_blocks.num_free
            lines.append(
                f"host memory: {plural(len(self._swapped), 'sequence')} in {taken} of "
                f"{plural(num_host_blocks, 'block')}"
            )
        return lines

    def _layer(self, layer: int) -> tuple[Any, ...]:
        if whole_number("layer", layer, least=0) >= self.num_layers:
            raise IndexError(f"`layer` must be < {self.num_layers}, got {layer}")
        return self.layers[layer]

    def _new_layer(self, num_blocks: int, **place: Any) -> tuple[Any, ...]:
        shape = num_blocks, self.block_size, self.num_kv_heads, self.head_size
        sizes = {"value_head_size": self.value_head_size, **place}
        if not self._quantized:
            return self._operations.empty_cache(*shape, dtype=self.format, **sizes)
        options = {"format": self.format, "scales_by_block": True, "inline": self._inline}
        return self._operations.empty_quant_cache(*shape, **options, **sizes)

    def _new_host_layer(self, num_blocks: int) -> tuple[Any, ...]:
        return self._new_layer(num_blocks, device=self.layers[0][0].sycl_queue, usm_type="host")

    def _on_device(self, values: np.ndarray) -> Any:
        return arrays.of_host(self.layers[0][0], values)

    def _require_no_step(self, call: str) -> None:
        if self._open is not None:
            raise RuntimeError(f"`{call}` must not be called inside of a step: leave its `with` block first")

    def _require_unused(self, sequence: Hashable) -> None:
        """Raise where a sequence of this name is in host memory; the pool knows its own."""
        if sequence in self._swapped:
            raise ValueError(f"sequence {sequence!r} is in host memory: swap it in or free it first")
