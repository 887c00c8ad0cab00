"""Refuses calls whose written arrays share memory with other arguments: the result would be unspecified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..layout import Span, are_disjoint, extent
from ..runtime.launch.arrays import Operand


class _Range(NamedTuple):
    """An argument's place among the others, and its memory relative to its address."""

    at: int
    low: int
    high: int


class Guard:
    """Checks the addresses of one kind of call, whose shapes and strides are known.

    Ranges are compared first, strides only where ranges meet.
    """

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[str],
        operands: Sequence[Operand | None],
        may_overlap: Sequence[tuple[str, str]],
    ) -> None:
        self._names = names
        self._spans = {
            at: Span(tuple(operand.shape), tuple(operand.strides), operand.itemsize)
            for at, operand in enumerate(operands)
            if operand is not None and 0 not in operand.shape
        }
        ranges = {at: _Range(at, *extent(*span)) for at, span in self._spans.items()}
        allowed = {frozenset(pair) for pair in may_overlap}
        self._pairs: list[tuple[_Range, list[_Range]]] = []
        self._distinct: list[tuple[int, int]] = []
        written = [each for at, each in ranges.items() if kinds[at] == "written"]
        for number, own in enumerate(written):
            others = [
                each
                for at, each in ranges.items()
                if kinds[at] != "written" and frozenset((names[own.at], names[at])) not in allowed
            ]
            for other in written[number + 1 :]:
                if frozenset((names[own.at], names[other.at])) in allowed:
                    self._distinct.append((own.at, other.at))
                else:
                    others.append(other)
            self._pairs.append((own, others))

    def require_disjoint(self, addresses: Sequence[int]) -> None:
        """Raise ValueError where the arrays at these addresses overlap."""
        for first, second in self._distinct:
            if addresses[first] == addresses[second]:
                raise ValueError(f"`{self._names[second]}` must not be the memory of `{self._names[first]}`")
        for (at, low, high), others in self._pairs:
            start, end = addresses[at] + low, addresses[at] + high
            for other, other_low, other_high in others:
                place = addresses[other]
                if place + other_low < end and start < place + other_high:
                    self._require_apart(at, other, place - addresses[at])

    def _require_apart(self, written: int, other: int, distance: int) -> None:
        if not are_disjoint(self._spans[written], self._spans[other], distance):
            raise ValueError(
                f"`{self._names[written]}` is written, so it must not share memory with "
                f"`{self._names[other]}`; pass a copy of `{self._names[other]}`"
            )
