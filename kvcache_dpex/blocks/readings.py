"""What can be read of a pool."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..layout import slots_of_sequence, whole_number
from .inventory import Inventory, PoolStats
from .sequence import SequenceState
from .tiles import plural


class PoolReadings:
    """The part of `BlockPool` that changes nothing."""

    num_blocks: int
    block_size: int
    sliding_window: int | None
    _blocks: Inventory
    _states: dict[Hashable, SequenceState]
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
