"""What can be read of a pool."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..layout import slots_of_sequence, whole_number
from .arguments import ExtraKeys, Tokens, new_tokens
from .inventory import Inventory, PoolStats
from .sequence import SequenceState, longest_prefix
from .tiles import plural


class PoolReadings:
    """The part of `BlockPool` that changes nothing."""

    num_blocks: int
    block_size: int
    sliding_window: int | None
    _blocks: Inventory
    _states: dict[Hashable, SequenceState]
    _epoch: int  # how often the prefix cache was reset
    _hits: int
    _misses: int

    def block_table(self, sequence: Hashable) -> list[int]:
        """Blocks of a sequence in order, -1 for those that a sliding window has released; a copy."""
        return list(self._state(sequence).table)

    def slots(self, sequence: Hashable, start: int = 0, stop: int | None = None) -> list[int]:
        """Slots of the tokens ``start <= position < stop``, by default to the end; -1 where released."""
        state = self._state(sequence)
        stop = state.length if stop is None else self._checked_length(sequence, state, stop, "stop")
        start = self._checked_length(sequence, state, start, "start")
        return slots_of_sequence(state.table, start, stop, self.block_size)

    def length(self, sequence: Hashable) -> int:
        """Number of tokens of a sequence, those that a sliding window has left behind included."""
        return self._state(sequence).length

    def find_prefix(
        self, tokens: Tokens, *, extra_keys: ExtraKeys | None = None, max_prefix: int | None = None
    ) -> int:
        """Number of leading tokens that `allocate` would take from the cache; changes nothing.

        A model whose layers use several pools takes a prefix that all of them have: repeat with the least
        result as `max_prefix` until all agree, then allocate with it.
        """
        state = SequenceState(new_tokens(tokens, extra_keys), self.block_size, self._epoch)
        shared, _ = self._match(state, max_prefix)
        return len(shared) * self.block_size

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """Names of all sequences, the oldest first."""
        return tuple(self._states)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, those of cached prefixes included."""
        return self._blocks.num_free

    def stats(self) -> PoolStats:
        """Blocks by state, and counters of the prefix cache."""
        blocks = self._blocks
        return PoolStats(
            num_blocks=self.num_blocks,
            used=self.num_blocks - blocks.num_free,
            cached=len(blocks.cached),
            unused=len(blocks.unused),
            sequences=len(self._states),
            hits=self._hits,
            misses=self._misses,
            evictions=blocks.evictions,
        )

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._states

    def __repr__(self) -> str:
        found = self.stats()
        users = plural(found.sequences, "sequence")
        return (
            f"<BlockPool: {found.used} of {found.num_blocks} blocks used by {users}, "
            f"{found.cached} cached, {found.unused} unused, block_size {self.block_size}>"
        )

    def __rich__(self) -> Any:
        from .map import text_map

        return text_map(self)

    def _repr_html_(self) -> str:
        from .map import html_map

        return html_map(self)

    def _match(self, state: SequenceState, max_prefix: int | None) -> tuple[list[int], int]:
        """Blocks of the prefix that `state` may share, and how many full blocks must be computed."""
        most = max(state.length - 1, 0)  # the last token is always computed
        if max_prefix is not None:
            most = min(most, whole_number("max_prefix", max_prefix, least=0))
        if state.tokens is None:
            return [], 0
        stop = most // self.block_size
        shared = longest_prefix(self._blocks, state, stop, self.sliding_window)
        return shared, stop - len(shared)

    def _state(self, sequence: Hashable, argument: str = "sequence") -> SequenceState:
        try:
            return self._states[sequence]
        except KeyError:
            raise ValueError(
                f"`{argument}` must be in the pool, got {sequence!r}; it was freed or never allocated"
            ) from None
        except TypeError:
            raise TypeError(f"`{argument}` must be hashable, got {type(sequence).__name__}") from None

    def _require_new(self, argument: str, sequence: Hashable) -> None:
        try:
            exists = sequence in self._states
        except TypeError:
            raise TypeError(f"`{argument}` must be hashable, got {type(sequence).__name__}") from None
        if exists:
            raise ValueError(f"`{argument}` must be new to the pool, got {sequence!r}; free it first")

    def _checked_length(
        self, sequence: Hashable, state: SequenceState, length: int, argument: str = "length"
    ) -> int:
        length = whole_number(argument, length, least=0)
        if length > state.length:
            raise ValueError(
                f"`{argument}` must be <= {state.length}, the length of sequence {sequence!r}, got {length}"
            )
        return length
