"""Block tables of a batch, shared by all layers with the same sliding window."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks import BlockPool, OutOfBlocks
from ..blocks.arguments import Tokens


class Step(NamedTuple):
    """What all layers of one forward pass share."""

    start: int  # tokens of the batch before this pass, padding included
    num_tokens: int  # of each sequence in this pass, padding included
    slots: Tensor  # [batch * count], -1 for padding
    block_table: Tensor  # [batch, blocks], int32, -1 for blocks that a window has left behind
    seq_lens: Tensor  # [batch], int32, without padding
    query_start_loc: Tensor | None  # [batch + 1], int32; None for one token each
    copies: list[tuple[int, int]]  # blocks to copy before anything is written


class Tables:
    """The rows of a batch as sequences of a `BlockPool`.

    Parameters
    ----------
    block_size
        Tokens of a block.
    window
        Sliding window of the layers, or None.
    num_blocks
        Blocks of the pool; None to begin with few and grow.
    """

    def __init__(self, block_size: int, window: int | None, num_blocks: int | None) -> None:
        self.grows = num_blocks is None
        self.pool = BlockPool(num_blocks or 16, block_size, sliding_window=window)
        self.names = itertools.count()
        self.recording = False  # keep blocks behind the window, so that `crop` can go back
        self.reset()

    def reset(self) -> None:
        """Forget all sequences; their blocks are free."""
        for row in getattr(self, "rows", []):
            self.pool.free(row)
        self.rows: list[int] = []
        self.padding: list[int] = []
        self.length = 0
        self.step: Step | None = None

    def advance(
        self, start: int, batch: int, count: int, padding: Sequence[int] | None, device: torch.device
    ) -> Step:
        """Room for `count` more tokens of each sequence; the same for every layer of a forward pass."""
        step = self.step
        if step is not None and (step.start, step.num_tokens) == (start, count):
            return step
        if start != self.length:
            raise RuntimeError(
                f"a layer has {start} tokens of a cache that has {self.length}: a forward pass was "
                "interrupted; call reset() and begin anew"
            )
        if not self.rows:
            self.rows = [next(self.names) for _ in range(batch)]
            for row in self.rows:
                self.pool.allocate(row, 0)
            self.padding = list(padding) if padding is not None else [0] * batch
        if batch != len(self.rows):
            raise ValueError(f"the cache holds a batch of {len(self.rows)}, got one of {batch}; call reset()")
        # A row that has been nothing but padding may have more of it.
        if padding is not None and any(now != pad < start for now, pad in zip(padding, self.padding)):
            raise ValueError(
                f"the padding of sequences must not change while they are in the cache, {self.padding}, got "
                f"{list(padding)}"
            )
        self.padding = self.padding if padding is None else list(padding)
        self._release()
        new = [count - min(max(pad - start, 0), count) for pad in self.padding]
        copies = self._append({row: number for row, number in zip(self.rows, new) if number})
        self.length = start + count
        self.step = self._step(start, count, copies, device)
        return self.step

    def crop(self, count: int) -> None:
        """Drop the last `count` tokens of every sequence."""
        length = self.length - count
        for row, pad in zip(self.rows, self.padding):
            self.pool.truncate(row, max(length - pad, 0))
        self.length, self.step = length, None
        recording, self.recording = self.recording, False
        self._release()
        self.recording = recording

    def select(self, rows: Sequence[int]) -> None:
        """Make the batch of these rows of it; a row that is named several times shares its blocks."""
        kept = [next(self.names) for _ in rows]
        for row, name in zip(rows, kept):
            self.pool.fork(self.rows[row], name)
        for row in self.rows:
            self.pool.free(row)
        self.padding = [self.padding[row] for row in rows]
        self.rows, self.step = kept, None

    def _append(self, tokens: dict[Hashable, Tokens]) -> list[tuple[int, int]]:
        try:
            return self.pool.append_batch(tokens)
        except OutOfBlocks as error:
            if not self.grows:
                raise
            self.pool.grow(max(error.needed - error.free, self.pool.num_blocks // 2))
            return self.pool.append_batch(tokens)

    def _release(self) -> None:
        """Give back the blocks that the window has left behind."""
        if self.pool.sliding_window is not None and not self.recording:
            for row in self.rows:
                self.pool.commit(row)

    def _step(self, start: int, count: int, copies: list[tuple[int, int]], device: torch.device) -> Step:
        tables = [self.pool.block_table(row) for row in self.rows]
        width = max(map(len, tables))
        table = torch.tensor([each + [-1] * (width - len(each)) for each in tables], dtype=torch.int32)
        padding = torch.tensor(self.padding)
        positions = torch.arange(start, self.length) - padding[:, None]
        size = self.pool.block_size
        blocks = table.gather(1, positions.clamp(min=0) // size).long()
        slots = torch.where(positions < 0, -1, blocks * size + positions % size).flatten()
        starts = None if count == 1 else torch.arange(len(tables) + 1, dtype=torch.int32) * count
        return Step(
            start,
            count,
            slots.to(device),
            table.to(device),
            (self.length - padding).clamp(min=0).to(device, torch.int32),
            None if starts is None else starts.to(device),
            copies,
        )
