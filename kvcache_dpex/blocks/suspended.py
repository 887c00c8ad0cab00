"""Sequences that leave a pool and come back, such as to host memory or to another process."""

from __future__ import annotations

from collections.abc import Hashable

from .inventory import OutOfBlocks
from .readings import PoolReadings
from .sequence import SequenceState


class Suspended(PoolReadings):
    """The part of `BlockPool` that takes sequences out and in again."""

    def detach(self, sequence: Hashable) -> SequenceState:
        """Remove a sequence and return its state, which `attach` takes.

        Its blocks become free as with `free`, so their contents must be copied by then. The state's
        `held` lists them in order.
        """
        state = self._state(sequence)
        self._blocks.release(state.held)
        del self._states[sequence]
        return state

    def attach(self, sequence: Hashable, state: SequenceState) -> list[int]:
        """Add a sequence with the state of one that was detached; `state` itself stays as it is.

        Blocks of it that are still cached are shared. The caller fills the others and then calls `commit`
        with ``state.published * block_size``, so that they are found again, too.

        Returns
        -------
        list of int
            Places in the block table whose blocks must be filled.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free. Nothing has changed.
        ValueError
            The pool has a sequence of this name.

        Examples
        --------
        >>> from kvcache_dpex import BlockPool
        >>> pool = BlockPool(num_blocks=4, block_size=4)
        >>> pool.allocate("a", [1, 2, 3, 4, 5, 6])
        0
        >>> pool.commit("a")
        >>> state = pool.detach("a")
        >>> pool.attach("a", state)  # the first block is cached
        [1]
        """
        self._require_new("sequence", sequence)
        twin, inventory = state.copy(), self._blocks
        held = range(state.released, len(state.table))
        found = {}
        if state.epoch == self._epoch:
            blocks = ((at, inventory.block_of.get(state.hashes[at])) for at in held if at < state.published)
            found = {at: block for at, block in blocks if block is not None}
        missing = [at for at in held if at not in found]
        free = inventory.num_free - sum(not inventory.references[block] for block in found.values())
        if len(missing) > free:
            raise OutOfBlocks(f"sequence {sequence!r}", len(missing), free, self.num_blocks)
        inventory.share(found.values())
        for at, block in (*found.items(), *zip(missing, inventory.take(len(missing)))):
            twin.table[at] = block
        twin.published = min([twin.published, *missing])
        self._states[sequence] = twin
        return missing
