"""Memory for what a kernel hands to the next one, used again by later calls on the same queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from . import arrays

if TYPE_CHECKING:
    import dpctl


class Scratch:
    """The spare memory of a queue; it goes with the last launch that uses it."""

    MOST = 4  # pieces that are kept: as many calls at the same time need no allocation

    def __init__(self, queue: dpctl.SyclQueue) -> None:
        self._queue = queue
        self._spare: list[Any] = []

    @contextmanager
    def lent(self, size: int) -> Iterator[Any]:
        """At least `size` bytes, for kernels that are submitted within.

        They may run later: whoever gets the memory next submits to the same queue, in order after them.
        """
        memory = self._take(size)
        try:
            yield memory
        finally:
            if len(self._spare) < self.MOST:
                self._spare.append(memory)

    def _take(self, size: int) -> Any:
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = None
        if memory is None or memory.size < size:  # a piece that is too small is released
            memory = arrays.tensor_module().empty(size, dtype="u1", sycl_queue=self._queue)
        return memory


_of_queues: WeakValueDictionary[dpctl.SyclQueue, Scratch] = WeakValueDictionary()


def of_queue(queue: dpctl.SyclQueue) -> Scratch:
    """The scratch memory that all launches on a queue share."""
    found = _of_queues.get(queue)
    if found is None:
        found = _of_queues.setdefault(queue, Scratch(queue))
    return found
