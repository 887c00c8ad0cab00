"""BlockPool: which blocks of a cache belong to which sequence."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ..layout import cache_shapes, whole_number
from .arguments import ExtraKeys, Tokens, new_tokens
from .inventory import Inventory, OutOfBlocks
from .sequence import SequenceState, blocks_to_grow, first_needed, grow
from .suspended import Suspended


class BlockPool(Suspended):
    """Assigns the blocks of a paged cache to sequences. Holds no arrays.

    A pool tells where each token's keys and values lie; the caller writes, copies and reads them. After
    each forward pass, `commit` says which tokens have been written: only then may their blocks be found
    by other sequences with the same prefix, and only then does a sliding window release blocks.

    Time and memory of a call are proportional to the blocks it concerns, never to the pool's size.
    A pool is not thread-safe: use it from one thread, or under a lock.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks in the cache, and tokens in a block.
    sliding_window : int, optional
        Number of latest tokens that a token attends to, itself included. Blocks that no later token
        can reach are released by `commit`. Layers of different windows need pools of their own.

    Examples
    --------
    >>> pool = BlockPool(num_blocks=8, block_size=4)
    >>> pool.allocate("a", [1, 2, 3, 4, 5, 6])  # no token is cached yet
    0
    >>> pool.block_table("a"), pool.slots("a", 3)
    ([0, 1], [3, 4, 5])
    >>> pool.commit("a")  # after the forward pass that wrote these slots
    >>> pool.allocate("b", [1, 2, 3, 4, 9])  # shares the block of tokens 1 to 4
    4
    >>> pool.fork("a", "c")
    >>> pool.append("c", [7])  # tokens 5 and 6 are shared: copy their block before writing
    [(1, 3)]
    >>> pool
    <BlockPool: 4 of 8 blocks used by 3 sequences, 0 cached, 4 unused, block_size 4>
    """

    def __init__(self, num_blocks: int, block_size: int, *, sliding_window: int | None = None) -> None:
        self.num_blocks, self.block_size = cache_shapes(num_blocks, block_size, 1, 1)[0][:2]
        if sliding_window is not None:
            sliding_window = whole_number("sliding_window", sliding_window, least=1)
        self.sliding_window = sliding_window
        self._blocks = Inventory(self.num_blocks)
        self._states: dict[Hashable, SequenceState] = {}
        self._epoch = self._hits = self._misses = 0

    def allocate(
        self,
        sequence: Hashable,
        tokens: Tokens,
        *,
        extra_keys: ExtraKeys | None = None,
        max_prefix: int | None = None,
    ) -> int:
        """Add a sequence, with blocks for all of its tokens or an error.

        Full blocks of the same tokens that an earlier sequence committed are shared. The last token is
        never taken from the cache, since the model must compute it to predict the next one.

        Parameters
        ----------
        sequence : hashable
            A name for the sequence, such as a request's id.
        tokens : sequence of int, or int
            Token ids; or only their number, and then the sequence takes no part in prefix reuse.
        extra_keys : mapping of int to str or bytes, optional
            What keys and values depend on besides token ids, by position: blocks from that position on
            are shared only with sequences that have the same key there. Use position 0 for an adapter or
            a tenant, and the position of its first placeholder token for an image.
        max_prefix : int, optional
            Take at most this many tokens from the cache; 0 for none.

        Returns
        -------
        int
            Number of leading tokens, a multiple of the block size, that need not be computed.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free. Nothing has changed.
        ValueError
            The pool has a sequence of this name.
        """
        self._require_new("sequence", sequence)
        state = SequenceState(new_tokens(tokens, extra_keys), self.block_size, self._epoch)
        shared, misses = self._match(state, max_prefix)
        state.table, state.released = shared, shared.count(-1)
        needed, references = state.missing(), self._blocks.references
        free = self._blocks.num_free - sum(not references[block] for block in state.held)
        if needed > free:
            raise OutOfBlocks(f"sequence {sequence!r}", needed, free, self.num_blocks)
        self._blocks.share(state.held)
        state.published = len(shared)
        self._hits += len(shared)
        self._misses += misses
        state.table = shared + self._blocks.take(needed)
        self._states[sequence] = state
        return len(shared) * self.block_size

    def append(
        self, sequence: Hashable, tokens: Tokens, *, extra_keys: ExtraKeys | None = None
    ) -> list[tuple[int, int]]:
        """Add tokens to the end of a sequence, in place, with new blocks only where its last one is full.

        Parameters
        ----------
        sequence : hashable
            A sequence of this pool.
        tokens : sequence of int, or int
            Token ids if the sequence was allocated with ids, else the number of tokens.
        extra_keys : mapping of int to str or bytes, optional
            As for `allocate`. Positions count from the start of the sequence.

        Returns
        -------
        list of (int, int)
            Blocks ``(source, target)`` to copy before anything is written to the new slots: at most one,
            where the last block is partly filled and shared with a fork.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free. Nothing has changed.
        """
        return self._grow({sequence: tokens}, {sequence: extra_keys})

    def append_batch(
        self,
        tokens: Mapping[Hashable, Tokens],
        *,
        extra_keys: Mapping[Hashable, ExtraKeys] | None = None,
    ) -> list[tuple[int, int]]:
        """Append to several sequences: to all of them, or to none.

        Parameters
        ----------
        tokens : mapping of hashable to sequence of int, or int
            For each sequence, its new tokens, as for `append`.
        extra_keys : mapping of hashable to mapping, optional
            For each sequence that has some, its extra keys, as for `append`.

        Returns
        -------
        list of (int, int)
            Blocks ``(source, target)`` to copy before anything is written to the new slots.

        Raises
        ------
        OutOfBlocks
            Too few blocks are free for all of them. Nothing has changed.

        Examples
        --------
        >>> pool = BlockPool(num_blocks=8, block_size=4)
        >>> pool.allocate("a", 6), pool.fork("a", "b")
        (0, None)
        >>> pool.append_batch({"a": 1, "b": 1})  # one of the two may write to the shared block
        [(1, 2)]
        """
        return self._grow(tokens, extra_keys or {})

    def commit(self, sequence: Hashable, length: int | None = None) -> None:
        """Say that the keys and values of a sequence's first tokens have been written.

        Their full blocks may be shared from now on, and those that a sliding window has left behind are
        released: -1 takes their place in the block table, and positions stay as they are. Of several blocks
        with the same prefix, only the first that was committed is shared.

        Call it after each forward pass, and with speculative decoding after `truncate` has dropped the
        tokens that were not accepted. Tokens that are never committed are never shared, so a forward
        pass that failed leaves nothing behind for other sequences.

        Parameters
        ----------
        sequence : hashable
            A sequence of this pool.
        length : int, optional
            Number of leading tokens that have been written; by default all of them.
        """
        state = self._state(sequence)
        length = state.length if length is None else self._checked_length(sequence, state, length)
        full = length // self.block_size
        if state.tokens is not None and state.epoch == self._epoch:
            hashes = state.hashes_up_to(full)
            for index in range(state.published, full):
                self._blocks.publish(state.table[index], hashes[index])
            state.published = max(state.published, full)
        passed = first_needed(length, self.block_size, self.sliding_window)
        if passed > state.released:
            self._blocks.release(state.table[state.released : passed])
            state.table[state.released : passed] = [-1] * (passed - state.released)
            state.released = passed

    def fork(self, source: Hashable, target: Hashable) -> None:
        """Add a sequence `target` with the tokens of `source`, sharing all of its blocks.

        Takes no block. The first of the two to append to a partly filled last block gets a copy of it.
        """
        state = self._state(source, "source")
        self._require_new("target", target)
        self._blocks.share(state.held)
        self._states[target] = state.copy()

    def truncate(self, sequence: Hashable, length: int) -> None:
        """Keep the first `length` tokens of a sequence, in place, and free the blocks behind them.

        Raises
        ------
        ValueError
            `length` is more than the sequence has, or the next token would attend to positions whose
            blocks a sliding window has released. Nothing has changed.
        """
        state = self._state(sequence)
        length = self._checked_length(sequence, state, length)
        if first_needed(length, self.block_size, self.sliding_window) < state.released:
            least = state.released * self.block_size + (self.sliding_window or 1) - 1
            raise ValueError(
                f"`length` must be >= {least}, as the sliding window of {self.sliding_window} has released "
                f"the first {state.released} blocks of sequence {sequence!r}, got {length}; free the "
                "sequence and allocate its tokens again"
            )
        self._blocks.release(state.shorten(length))

    def free(self, sequence: Hashable) -> None:
        """Remove a sequence. Blocks that no other sequence holds become free.

        Committed blocks stay in the prefix cache until they are evicted, the least recently used first
        and the last block of a sequence before its first.
        """
        self.detach(sequence)

    def grow(self, count: int) -> None:
        """Add `count` blocks to the pool, once the cache's arrays have room for them.

        Examples
        --------
        >>> pool = BlockPool(num_blocks=1, block_size=4)
        >>> pool.grow(2)
        >>> pool.allocate("a", 12), pool.block_table("a")
        (0, [0, 1, 2])
        """
        self._blocks.grow(whole_number("count", count, least=0))
        self.num_blocks += count

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as after a change of the model's weights.

        Sequences keep their blocks, but what those of now commit later is not shared either, since it
        depends on the old weights. Takes time proportional to the number of cached blocks.
        """
        self._blocks.reset()
        self._epoch += 1

    def _grow(
        self, tokens: Mapping[Hashable, Tokens], extra_keys: Mapping[Hashable, ExtraKeys | None]
    ) -> list[tuple[int, int]]:
        """Append to each sequence, or to none."""
        states = [self._state(sequence) for sequence in tokens]
        new = []
        for state, (sequence, each) in zip(states, tokens.items()):
            new.append(new_tokens(each, extra_keys.get(sequence), state.length))
            if (new[-1].ids is None) != (state.tokens is None):
                raise TypeError(
                    f"`tokens` must be {'a number of tokens' if state.tokens is None else 'token ids'}, as "
                    f"when sequence {sequence!r} was allocated, got {type(each).__name__}"
                )
        needed = blocks_to_grow(self._blocks, states, new)
        if needed > self.num_free:
            names = f"sequence {next(iter(tokens))!r}" if len(tokens) == 1 else f"{len(tokens)} sequences"
            raise OutOfBlocks(f"appending to {names}", needed, self.num_free, self.num_blocks)
        return grow(self._blocks, states, new)
