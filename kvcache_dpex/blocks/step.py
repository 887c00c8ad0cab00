"""Step: the new tokens of some sequences, on their way through the layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..runtime.launch import arrays

if TYPE_CHECKING:
    from .cache import PagedCache


class Step:
    """New tokens of one or several sequences; `PagedCache.step` makes it.

    Their rows lie one sequence after the other, in the order in which `step` was given them.

    Attributes
    ----------
    start : dict of hashable to int
        Position of the first row of each sequence. A new sequence whose prefix is cached starts behind it.
    num_tokens : int
        Rows of all sequences together.
    positions : [num_tokens], int64
        Position of each row in its sequence.
    slot_mapping : [num_tokens], int64
        Slot of each row.
    block_table : [num_seqs, max_blocks], int32
        Blocks of each sequence, -1 where a window has released them and behind the end.
    seq_lens : [num_seqs], int32
        Tokens of each sequence, the new ones included.
    query_start_loc : [num_seqs + 1], int32, or None
        First row of each sequence; None where each has one row.
    """

    def __init__(self, cache: PagedCache, start: Mapping[Hashable, int]) -> None:
        pool, names = cache.pool, list(start)
        self._cache, self.start = cache, dict(start)
        self._written: set[int] = set()
        lengths = [pool.length(name) for name in names]
        counts = [length - start[name] for name, length in zip(names, lengths)]
        tables = [pool.block_table(name) for name in names]
        table = np.full((len(names), max(1, *map(len, tables))), -1, np.int32)
        for row, blocks in zip(table, tables):
            row[: len(blocks)] = blocks
        slots = [slot for name in names for slot in pool.slots(name, start[name])]
        positions = [np.arange(start[name], length) for name, length in zip(names, lengths)]
        self.num_tokens = len(slots)
        self.positions = cache._on_device(np.concatenate(positions).astype(np.int64))
        self.slot_mapping = cache._on_device(np.array(slots, np.int64))
        self.block_table = cache._on_device(table)
        self.seq_lens = cache._on_device(np.array(lengths, np.int32))
        ends = np.cumsum([0, *counts]).astype(np.int32)
        self.query_start_loc = None if set(counts) == {1} else cache._on_device(ends)

    def append(self, layer: int, key: Any, value: Any) -> None:
        """Write a layer's keys and values of the new tokens, in place.

        Parameters
        ----------
        layer : int
            ``0 <= layer < num_layers``.
        key, value : [num_tokens, num_kv_heads, head_size]
            In the dtype of the cache, or where it keeps codes in float32, float16 or bfloat16 (uint16 arrays
            hold the bits of bfloat16). `value` may have a head size of its own.

        Raises
        ------
        TypeError, ValueError
            As `reshape_and_cache` and `reshape_and_cache_quant` do; nothing is then written.
        """
        caches = self._layer(layer)
        for name, rows in (("key", key), ("value", value)):
            self._require_rows(name, rows)
        operations, cache = self._cache._operations, self._cache
        if cache._quantized:
            options = {"dtype": _bits(key), "format": cache.format}
            operations.reshape_and_cache_quant(key, value, *caches, self.slot_mapping, **options)
        else:
            operations.reshape_and_cache(key, value, *caches, self.slot_mapping)
        self._written.add(layer)

    def attend(self, layer: int, query: Any, **options: Any) -> Any:
        """Causal attention of the new tokens to all tokens of their sequences.

        Parameters
        ----------
        layer : int
            A layer whose keys and values were appended.
        query : [num_tokens, num_q_heads, head_size]
            As for `paged_attention`.
        **options
            As for `paged_attention`: `scale`, `soft_cap`, `sinks`, `out`, `lse`, `return_lse`,
            `batch_invariant`; and `sliding_window`, by default that of the cache.

        Returns
        -------
        array, or (array, array)
            As `paged_attention` returns it.
        """
        key_cache, value_cache, *scales = self._layer(layer)
        if layer not in self._written:
            raise RuntimeError(f"layer {layer} must have the keys and values of the new tokens: append first")
        self._require_rows("query", query)
        cache = self._cache
        given = {"sliding_window": cache.pool.sliding_window, "query_start_loc": self.query_start_loc}
        if scales:
            given.update(key_scales=scales[0], value_scales=scales[1], format=cache.format)
        caches = key_cache, value_cache, self.block_table, self.seq_lens
        given.update(options)
        return cache._operations.paged_attention(query, *caches, dtype=_bits(query), **given)

    def _layer(self, layer: int) -> tuple[Any, ...]:
        if self._cache._open is not self:
            raise RuntimeError("the step has ended: call this inside of its `with` block")
        return self._cache._layer(layer)

    def _require_rows(self, name: str, rows: Any) -> None:
        if rows.shape[0] != self.num_tokens:
            raise ValueError(
                f"`{name}` must have a row for each of the {self.num_tokens} new tokens of {len(self.start)} "
                f"sequences, got shape {list(rows.shape)}; `start` says which tokens are new"
            )

    def _require_complete(self) -> None:
        missing = [layer for layer in range(self._cache.num_layers) if layer not in self._written]
        if self.num_tokens and missing:
            raise RuntimeError(
                f"every layer must be appended before the step ends, layers {missing} were not; the step's "
                "tokens have been taken back"
            )


def _bits(rows: Any) -> str | None:
    """What uint16 arrays hold."""
    return "bfloat16" if not arrays.is_tensor(rows) and str(rows.dtype) == "uint16" else None
