"""What a pool knows of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from .arguments import NewTokens
from .hashing import chained
from .inventory import Inventory


class SequenceState:
    """Tokens and block table of a sequence; `BlockPool` checks and changes it."""

    __slots__ = (
        *("tokens", "length", "keys", "block_size", "epoch", "table", "hashes"),
        *("published", "released"),
    )

    def __init__(self, new: NewTokens, block_size: int, epoch: int) -> None:
        self.tokens = new.ids  # None where only their number is known
        self.length = new.num_tokens
        self.keys = new.keys  # extra keys by position
        self.block_size = block_size
        self.epoch = epoch  # how often the pool's prefix cache had been reset
        self.table: list[int] = []
        self.hashes: list[bytes] = []  # of the leading full blocks, as far as they were needed
        self.published = 0  # leading blocks whose hashes were offered to the pool
        self.released = 0  # leading blocks that a sliding window left behind: -1 in the table

    @property
    def held(self) -> list[int]:
        """The blocks of the table that the sequence has a reference to."""
        return self.table[self.released :]

    def copy(self) -> SequenceState:
        """The state of a fork."""
        tokens = None if self.tokens is None else self.tokens[:]
        twin = SequenceState(NewTokens(tokens, self.length, dict(self.keys)), self.block_size, self.epoch)
        twin.table, twin.hashes = list(self.table), list(self.hashes)
        twin.published, twin.released = self.published, self.released
        return twin

    def missing(self, count: int = 0) -> int:
        """How many blocks the table lacks for its tokens and `count` more."""
        return -(-(self.length + count) // self.block_size) - len(self.table)

    def block_written(self, new: NewTokens) -> int | None:
        """The partly filled last block, if the next tokens go there."""
        return self.table[-1] if new.num_tokens and self.length % self.block_size else None

    def hashes_up_to(self, stop: int) -> list[bytes]:
        """Hashes of at least the first `stop` blocks, which must be full."""
        assert self.tokens is not None
        if stop > len(self.hashes):
            self.hashes += chained(self.tokens, self.keys, self.block_size, self.hashes, stop)
        return self.hashes

    def extend(self, new: NewTokens) -> None:
        if self.tokens is not None and new.ids is not None:
            self.tokens.extend(new.ids)
        self.length += new.num_tokens
        self.keys.update(new.keys)

    def shorten(self, length: int) -> list[int]:
        """Keep the first `length` tokens, and return the blocks that this leaves without a token."""
        if self.tokens is not None:
            del self.tokens[length:]
        self.keys = {position: key for position, key in self.keys.items() if position < length}
        full = length // self.block_size
        del self.hashes[full:]
        self.length = length
        self.published = min(self.published, full)
        end = -(-length // self.block_size)
        surplus = self.table[end:]
        del self.table[end:]
        return surplus


def grow(
    inventory: Inventory, states: Sequence[SequenceState], new: Sequence[NewTokens]
) -> list[tuple[int, int]]:
    """Append to each state its new tokens; `blocks_to_grow` are free. Returns the blocks to copy."""
    copies = []
    for state, part in zip(states, new):
        last = state.block_written(part)
        if last is not None:
            if inventory.references[last] > 1:
                (state.table[-1],) = inventory.take(1)
                inventory.release([last])
                copies.append((last, state.table[-1]))
            else:
                inventory.withdraw(last)
        missing = state.missing(part.num_tokens)
        if missing:
            state.table += inventory.take(missing)
        state.extend(part)
    return copies


def blocks_to_grow(inventory: Inventory, states: Sequence[SequenceState], new: Sequence[NewTokens]) -> int:
    """How many blocks `grow` takes."""
    needed = 0
    writers: dict[int, int] = {}
    for state, part in zip(states, new):
        needed += state.missing(part.num_tokens)
        last = state.block_written(part)
        if last is not None:
            # Each writer but the last to hold a block needs a copy of it.
            writers[last] = writers.get(last, 0) + 1
            needed += writers[last] < inventory.references[last]
    return needed


def longest_prefix(
    inventory: Inventory, state: SequenceState, stop: int, sliding_window: int | None
) -> list[int]:
    """Blocks of the longest cached prefix of up to `stop` blocks; -1 for those before the window."""
    found: list[int] = []
    usable = run = 0  # `run` is where the current run of cached blocks starts
    for digest in state.hashes_up_to(stop)[:stop]:
        block = inventory.block_of.get(digest, -1)
        found.append(block)
        if block < 0:
            run = len(found)
            if sliding_window is None:
                break
        elif run <= first_needed(len(found) * state.block_size, state.block_size, sliding_window):
            usable = len(found)
    passed = first_needed(usable * state.block_size, state.block_size, sliding_window)
    return [-1] * passed + found[passed:usable]


def first_needed(length: int, block_size: int, sliding_window: int | None) -> int:
    """Index of the first block that tokens at positions >= `length` attend to."""
    return 0 if sliding_window is None else max(0, length - sliding_window + 1) // block_size
