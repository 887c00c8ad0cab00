"""Sequences that leave a `PagedCache` for host memory or as bytes, and come back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..runtime.launch import arrays
from . import message
from .arguments import NewTokens
from .inventory import OutOfBlocks
from .sequence import SequenceState
from .storage import Storage


class Transfers(Storage):
    """The part of `PagedCache` that takes sequences out and in again."""

    def swap_out(self, sequence: Hashable) -> None:
        """Move a sequence to host memory, so that others can have its blocks.

        Its blocks are copied in all layers, those that it shares included. While it is there it can be
        freed or swapped in, nothing else.

        Raises
        ------
        OutOfBlocks
            Too few of the `num_host_blocks` are free. Nothing has changed.
        """
        self._require_no_step("swap_out")
        held = self.pool._state(sequence).held
        if len(held) > self._host_blocks.num_free:
            raise OutOfBlocks(
                f"swapping out sequence {sequence!r}",
                len(held),
                self._host_blocks.num_free,
                len(self._host_blocks.references),
                in_host_memory=True,
            )
        blocks = self._host_blocks.take(len(held))
        try:
            if blocks:
                self._operations.swap_blocks(self.layers, self._host_layers, list(zip(held, blocks)))
        except BaseException:
            self._host_blocks.release(blocks)
            raise
        self._swapped[sequence] = self.pool.detach(sequence), blocks

    def swap_in(self, sequence: Hashable) -> None:
        """Move a sequence from host memory back to blocks of the cache.

        Blocks of it that are still cached are shared, and not copied.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free. Nothing has changed.
        """
        self._require_no_step("swap_in")
        if sequence not in self._swapped:
            raise ValueError(f"`sequence` must be in host memory, got {sequence!r}; `swapped` lists those")
        state, blocks = self._swapped[sequence]
        self._restore(sequence, state, self._host_layers, blocks)
        del self._swapped[sequence]
        self._host_blocks.release(blocks)

    @property
    def swapped(self) -> tuple[Hashable, ...]:
        """Names of the sequences in host memory, the first to leave first."""
        return tuple(self._swapped)

    def export_sequence(self, sequence: Hashable) -> bytes:
        """A sequence as bytes: token ids, extra keys, and the rows of all layers; waits for them.

        `import_sequence` takes them in another process or on another machine, whatever its arrays are and
        however large its blocks. The sequence stays in the cache.

        Returns
        -------
        bytes
            One buffer with a version and a checksum; no code and no pickle.

        Examples
        --------
        >>> import dpnp
        >>> from kvcache_dpex import PagedCache
        >>> shape = {"num_layers": 1, "num_blocks": 8, "num_kv_heads": 2, "head_size": 8, "device": "cpu"}
        >>> cache, other = PagedCache(block_size=4, **shape), PagedCache(block_size=2, **shape)
        >>> rows = dpnp.ones((3, 2, 8), dtype="float32", device="cpu")
        >>> with cache.step({"a": [11, 12, 13]}) as step:
        ...     step.append(0, rows, rows)
        >>> other.import_sequence("b", cache.export_sequence("a"))
        >>> other.length("b")
        3
        """
        self._require_no_step("export_sequence")
        state = self.pool._state(sequence)
        first = state.released * self.block_size
        rows = []
        if state.held:
            ids = self._on_device(np.array(state.held, np.int64))
            for array in (each for layer in self.layers for each in layer):
                blocks = arrays.to_numpy(self._operations.gather_blocks(array, ids))
                slots = blocks.reshape(-1, *blocks.shape[2:])
                rows.append(np.ascontiguousarray(slots[: state.length - first]))
        description = {
            **self._kind(),
            "num_tokens": state.length,
            "first_row": first,
            "committed": state.published * self.block_size,
            "extra_keys": [[position, key.hex()] for position, key in state.keys.items()],
        }
        return message.pack(description, state.tokens, rows)

    def import_sequence(self, sequence: Hashable, data: Any) -> None:
        """Add a sequence from the bytes that `export_sequence` returned, in place.

        Blocks with its prefix that are cached here are shared. What the prefix cache may share depends on
        the model's weights: take sequences of the same weights only.

        Parameters
        ----------
        sequence : hashable
            A name that is new to the cache.
        data : bytes-like
            What `export_sequence` returned.

        Raises
        ------
        ValueError
            `data` is damaged or not such bytes, or comes from a cache of another kind. Nothing has changed.
        OutOfBlocks
            Too few blocks are free. Nothing has changed.
        """
        self._require_no_step("import_sequence")
        self._require_unused(sequence)
        description, ids, content = message.unpack(data)
        for name, own in self._kind().items():
            if description[name] != own:
                raise ValueError(
                    f"`data` must come from a cache with {name} = {own!r}, got {description[name]!r}"
                )
        length, first = description["num_tokens"], description["first_row"]
        keys = {position: bytes.fromhex(key) for position, key in description["extra_keys"]}
        state = SequenceState(NewTokens(ids, length, keys), self.block_size, self.pool._epoch)
        state.released = first // self.block_size
        state.table = [-1] * -(-length // self.block_size)
        if ids is not None:
            state.published = description["committed"] // self.block_size
            state.hashes_up_to(state.published)
        blocks = self._blocks_of(content, length - first, first % self.block_size) if state.held else []
        self._restore(sequence, state, [blocks], range(len(state.held)))

    def _restore(
        self, sequence: Hashable, state: SequenceState, sources: list, blocks: Sequence[int]
    ) -> None:
        """Attach a sequence, and copy from `sources` those of its blocks that are not cached."""
        missing = self.pool.attach(sequence, state)
        table = self.pool.block_table(sequence)
        pairs = [(blocks[at - state.released], table[at]) for at in missing]
        try:
            if pairs:
                self._operations.swap_blocks(sources, self.layers, pairs)
        except BaseException:
            self.pool.free(sequence)
            raise
        self.pool.commit(sequence, state.published * self.block_size)

    def _kind(self) -> dict[str, Any]:
        """What two caches must have in common to exchange sequences."""
        return {
            "format": self.format,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "value_head_size": self.value_head_size,
            "sliding_window": self.pool.sliding_window,
        }

    def _blocks_of(self, content: memoryview, num_rows: int, offset: int) -> list[Any]:
        """An array of blocks for each array of the cache; the first row has this offset in its block."""
        found = []
        num_blocks = -(-(offset + num_rows) // self.block_size)
        for layer in self.layers:
            for at, array in enumerate(layer):
                dtype = arrays.storage_dtype(self._format.dtype if at < 2 else "float32")
                host = np.zeros((num_blocks, self.block_size, *array.shape[2:]), dtype)
                rows = host.reshape(-1, *host.shape[2:])[offset : offset + num_rows]
                rows[:] = np.frombuffer(content[: rows.nbytes], dtype).reshape(rows.shape)
                content = content[rows.nbytes :]
                blocks = self._on_device(host)
                found.append(blocks.view(array.dtype) if arrays.is_tensor(array) else blocks)
        return found
