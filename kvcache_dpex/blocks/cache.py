"""PagedCache: keys and values of sequences in all layers of a model, in blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

from .arguments import ExtraKeys, Tokens
from .step import Step
from .transfers import Transfers


class PagedCache(Transfers):
    """Keys and values of sequences in all layers of a model, in blocks that a `BlockPool` hands out.

    dpnp arrays; ``kvcache_dpex.torch.PagedCache`` is the same for tensors. A cache is not thread-safe.

    Parameters
    ----------
    num_layers, num_blocks, block_size, num_kv_heads, head_size : int
        Layers of the model, blocks of the cache, tokens of a block, and heads of keys and values.
    value_head_size : int, optional
        Head size of values where it differs.
    format : str
        ``"float32"``, ``"float16"`` or ``"bfloat16"`` keeps keys and values as they are;
        ``"int8_per_token_head"`` or ``"fp8_per_token_head"`` keeps codes and scales.
    inline : str, optional
        ``"NHD"`` or ``"HND"`` keeps scales beside their codes, in one allocation a layer, as for
        `empty_quant_cache`.
    sliding_window : int, optional
        As for `BlockPool`. Layers of different windows need caches of their own.
    num_host_blocks : int
        Blocks in host memory for sequences that are swapped out.
    device
        As for `empty_cache`.

    Attributes
    ----------
    layers : list of tuples of arrays
        ``(key_cache, value_cache)`` of each layer, and where it keeps codes their scales
        ``[num_blocks, block_size, num_kv_heads]``.
    pool : BlockPool
        To read from. What changes it goes through the cache, which copies blocks where needed.

    Examples
    --------
    >>> import dpnp
    >>> cache = PagedCache(
    ...     num_layers=1, num_blocks=8, block_size=4, num_kv_heads=2, head_size=8, device="cpu"
    ... )
    >>> rows = dpnp.ones((6, 2, 8), dtype="float32", device="cpu")
    >>> with cache.step({"a": [11, 12, 13, 14, 15], "b": [21]}) as step:
    ...     step.append(0, rows, rows)
    ...     out = step.attend(0, rows)
    >>> out.shape
    (6, 2, 8)
    >>> cache.fork("a", "c")
    >>> cache.crop("c", 4)
    >>> [cache.length(name) for name in cache.sequences]
    [5, 1, 4]
    """

    @contextmanager
    def step(
        self,
        tokens: Mapping[Hashable, Tokens],
        *,
        extra_keys: Mapping[Hashable, ExtraKeys] | None = None,
    ) -> Iterator[Step]:
        """Append tokens to sequences, for one pass through the layers; a ``with`` statement takes it.

        Names that are new become sequences. Inside of the ``with`` block, `Step.append` takes each layer's
        keys and values of the new tokens, and `Step.attend` attends to them and to those before. At its
        end they are committed, so that other sequences may share their blocks. If it ends with an error,
        the sequences are as before.

        `crop` inside of the block drops drafts that were not accepted, before a window releases anything.

        Parameters
        ----------
        tokens : mapping of hashable to sequence of int, or int
            New tokens of each sequence: their ids, or their number where ids are unknown, as for
            `BlockPool.append`. A new sequence whose ids start as those of an earlier one shares its full
            blocks, and only the rows behind them are to be computed: see `Step.start`.
        extra_keys : mapping of hashable to mapping, optional
            For each sequence that has some, its extra keys, as for `BlockPool.allocate`.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free. No sequence has changed.
        RuntimeError
            A step is open already, or a layer was not appended.
        """
        __tracebackhide__ = True
        self._require_no_step("step")
        if not tokens:
            raise ValueError("`tokens` must name at least one sequence, got none")
        start, before = self._take(tokens, extra_keys or {})
        try:
            self._open = Step(self, start)
            yield self._open
            self._open._require_complete()
        except BaseException:
            self._take_back(before)
            raise
        finally:
            self._open = None
        for sequence in tokens:
            self.pool.commit(sequence)

    def fork(self, source: Hashable, target: Hashable) -> None:
        """Add a sequence `target` with the tokens of `source`, sharing all of its blocks.

        The first of the two to append to a partly filled last block gets a copy of it, in all layers.
        """
        self._require_no_step("fork")
        self._require_unused(target)
        self.pool.fork(source, target)

    def crop(self, sequence: Hashable, length: int) -> None:
        """Keep the first `length` tokens of a sequence, as `BlockPool.truncate` does."""
        self.pool.truncate(sequence, length)

    def free(self, sequence: Hashable) -> None:
        """Remove a sequence, one in host memory too.

        Blocks that no other sequence holds become free; full ones stay cached until they are evicted.
        """
        self._require_no_step("free")
        if sequence in self._swapped:
            _, blocks = self._swapped.pop(sequence)
            self._host_blocks.release(blocks)
        else:
            self.pool.free(sequence)

    def _take(
        self, tokens: Mapping[Hashable, Tokens], extra_keys: Mapping[Hashable, ExtraKeys]
    ) -> tuple[dict[Hashable, int], dict[Hashable, int | None]]:
        """Blocks for new tokens; where each sequence's rows start, and its length before, None if new."""
        __tracebackhide__ = True
        before = {name: self.pool.length(name) if name in self.pool else None for name in tokens}
        start = {name: length or 0 for name, length in before.items()}
        added = []
        try:
            for name in tokens:
                if before[name] is None:
                    self._require_unused(name)
                    start[name] = self.pool.allocate(name, tokens[name], extra_keys=extra_keys.get(name))
                    added.append(name)
            known = {name: each for name, each in tokens.items() if before[name] is not None}
            pairs = self.pool.append_batch(known, extra_keys=extra_keys)
        except BaseException:
            for name in added:
                self.pool.free(name)
            raise
        if pairs:
            self._operations.copy_blocks(self.layers, pairs)
        return start, before

    def _take_back(self, before: dict[Hashable, int | None]) -> None:
        for name, length in before.items():
            if length is None:
                self.pool.free(name)
            elif length < self.pool.length(name):
                self.pool.truncate(name, length)
