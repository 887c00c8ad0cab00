"""Which blocks are free, how many sequences hold each of the others, and whose contents are known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class OutOfBlocks(RuntimeError):
    """Too few blocks are free for a call, which has changed nothing.

    Attributes
    ----------
    needed, free : int
        Blocks that the call needs, and blocks that are free for it.
    """

    def __init__(
        self, what: str, needed: int, free: int, num_blocks: int, *, in_host_memory: bool = False
    ) -> None:
        self.needed, self.free = needed, free
        remedy = "free or truncate a sequence, or free one now and allocate it again later (preemption)"
        if needed > num_blocks:
            remedy = f"create the pool with `num_blocks` >= {needed}, or append in smaller parts"
        if in_host_memory:
            remedy = "swap in or free one of `swapped`, or create the cache with more `num_host_blocks`"
        super().__init__(f"{what} needs {needed} blocks, but {free} of {num_blocks} are free; {remedy}")


class PoolStats(NamedTuple):
    """Blocks by state, and counters since the pool was created.

    ``used + cached + unused == num_blocks``.
    """

    num_blocks: int
    used: int  # held by at least one sequence
    cached: int  # free, but kept for a sequence with the same prefix
    unused: int  # free, with no contents worth keeping
    sequences: int
    hits: int  # full blocks of prompts that need not be computed, as the prefix cache had them
    misses: int  # full blocks of prompts that it did not have
    evictions: int  # cached blocks that were handed out for other contents

    @property
    def utilisation(self) -> float:
        """Share of the blocks that is in use, 0 to 1."""
        return self.used / self.num_blocks if self.num_blocks else 0.0


class Inventory:
    """Reference counts, free blocks and the hashes of blocks; knows nothing of sequences.

    A free block is either unused or cached: its contents have a hash, so that a sequence with the same
    prefix may take it back until it is evicted. Every method but `reset` takes constant time a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self.unused = list(range(num_blocks - 1, -1, -1))  # a stack: the next block is at the end
        self.cached: OrderedDict[int, None] = OrderedDict()  # the least recently used is first
        self.evictions = 0

    @property
    def num_free(self) -> int:
        return len(self.unused) + len(self.cached)

    def grow(self, count: int) -> None:
        """Add `count` unused blocks, which are handed out after those that are unused now."""
        first = len(self.references)
        self.references += [0] * count
        self.hash_of += [None] * count
        self.unused[:0] = range(first + count - 1, first - 1, -1)

    def take(self, count: int) -> list[int]:
        """Hand out `count` <= `num_free` blocks with one reference each; evicts where too few are unused."""
        split = max(0, len(self.unused) - count)
        taken = self.unused[split:]
        del self.unused[split:]
        taken.reverse()
        while len(taken) < count:
            block, _ = self.cached.popitem(last=False)
            self.withdraw(block)
            self.evictions += 1
            taken.append(block)
        references = self.references
        for block in taken:
            references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; one that is cached is free no longer."""
        references = self.references
        for block in blocks:
            if not references[block]:
                del self.cached[block]
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a sequence, the last first, so that prefixes stay longest."""
        references, hash_of, unused = self.references, self.hash_of, self.unused
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if not left:
                if hash_of[block] is None:
                    unused.append(block)
                else:
                    self.cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Let `digest` find a block, unless it already finds one."""
        if digest not in self.block_of:
            self.block_of[digest] = block
            self.hash_of[block] = digest

    def withdraw(self, block: int) -> None:
        """Let no hash find a block, whose contents are about to change."""
        digest = self.hash_of[block]
        if digest is not None:
            del self.block_of[digest]
            self.hash_of[block] = None

    def reset(self) -> None:
        """Forget all hashes; takes constant time for each block that has one."""
        for block in self.block_of.values():
            self.hash_of[block] = None
        self.block_of.clear()
        self.unused.extend(reversed(self.cached))
        self.cached.clear()
