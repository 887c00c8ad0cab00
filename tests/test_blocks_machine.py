"""BlockPool against a model that writes, copies and reads rows, over random calls.

The model keeps a memory of rows. A row's right content is its whole prefix, so any block that is shared,
handed out or reused wrongly shows when a sequence reads what it wrote. 10,000 steps:
``python tests/test_blocks_machine.py``.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache_dpex.blocks import BlockPool, OutOfBlocks

TOKENS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["", "", "", "image"])), max_size=9)
QUICK = settings(max_examples=100, stateful_step_count=40, deadline=None)
LONG = settings(
    max_examples=400, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([12, 8, 16, 5, 2]),
        block_size=st.sampled_from([2, 1, 3, 4]),
        window=st.none() | st.integers(1, 7),
    )
    def create(self, num_blocks, block_size, window):
        self.pool = BlockPool(num_blocks, block_size, sliding_window=window)
        self.num_blocks, self.size, self.window = num_blocks, block_size, window
        self.memory = {}  # what was written to each slot: the prefix up to its token
        self.tokens, self.written, self.committed = {}, {}, {}
        self.offered = {}  # leading blocks of each sequence whose prefixes were offered to others
        self.findable = {}  # block of each committed prefix
        self.stale = set()  # sequences from before a reset of the prefix cache
        self.names = iter(range(10**9))
        self.hits = self.misses = self.evictions = 0

    # The model.

    def holders(self):
        """How many sequences hold each block."""
        return Counter(block for name in self.tokens for block in self.pool.block_table(name) if block >= 0)

    def first_needed(self, length):
        return max(0, length - self.window + 1) // self.size if self.window else 0

    def prefixes(self, tokens, stop):
        return [tuple(tokens[: (block + 1) * self.size]) for block in range(stop)]

    def expected_prefix(self, tokens):
        """The longest whole number of blocks that are found, the last one and those in its window."""
        found = [
            prefix in self.findable for prefix in self.prefixes(tokens, max(0, len(tokens) - 1) // self.size)
        ]
        first = [min(self.first_needed(n * self.size), n - 1) for n in range(1, len(found) + 1)]
        return max((n for n, start in enumerate(first, 1) if all(found[start:n])), default=0)

    def hand_out(self, blocks):
        """Blocks that were free are handed out: what was found there no longer is."""
        before = len(self.findable)
        self.findable = {prefix: block for prefix, block in self.findable.items() if block not in blocks}
        self.evictions += before - len(self.findable)

    def read_all(self):
        return {name: (self.pool.block_table(name), self.pool.length(name)) for name in self.tokens}

    def any_sequence(self, data):
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def refuses(self, call, needed, free):
        """An error with these numbers, after which everything is as it was."""
        before = self.read_all(), self.pool.stats()
        with pytest.raises(OutOfBlocks) as raised:
            call()
        assert (raised.value.needed, raised.value.free) == (needed, free)
        assert (self.read_all(), self.pool.stats()) == before

    # The calls.

    @rule(data=st.data())
    def allocate(self, data):
        """Often a prompt that starts with what was committed before."""
        tokens = [*data.draw(st.sampled_from([(), *sorted(self.findable)])), *data.draw(TOKENS)]
        name = next(self.names)
        ids, keys = arguments(tokens)
        held = self.holders()
        prefix = self.expected_prefix(tokens)
        shared = {
            self.findable[each]
            for each in self.prefixes(tokens, prefix)[self.first_needed(prefix * self.size) :]
        }
        needed = -(-len(tokens) // self.size) - prefix
        free = self.num_blocks - len(held.keys() | shared)
        assert self.pool.find_prefix(ids, extra_keys=keys) == prefix * self.size

        def call():
            return self.pool.allocate(name, ids, extra_keys=keys)

        if needed > free:
            self.refuses(call, needed, free)
            return
        assert call() == prefix * self.size
        self.tokens[name] = list(tokens)
        self.written[name] = self.committed[name] = prefix * self.size
        self.offered[name] = prefix
        self.hits += prefix
        self.misses += max(0, len(tokens) - 1) // self.size - prefix
        fresh = self.pool.block_table(name)[prefix:]
        assert len(set(fresh)) == needed
        assert not set(fresh) & (held.keys() | shared)
        self.hand_out(fresh)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append(self, data):
        """To one or several sequences, in one call."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, max_size=3, unique=True))
        tokens = {name: data.draw(TOKENS) for name in names}
        if len(names) > 1:
            tokens = {name: [(token, "") for token, _ in each] for name, each in tokens.items()}
        held = self.holders()
        tables = {name: self.pool.block_table(name) for name in names}
        copies, expected, needed = Counter(held), [], 0
        for name, each in tokens.items():
            length = len(self.tokens[name])
            needed += -(-(length + len(each)) // self.size) - len(tables[name])
            if each and length % self.size:
                last = tables[name][-1]
                if copies[last] > 1:
                    copies[last] -= 1
                    needed += 1
                    expected.append((name, last))
        free = self.num_blocks - len(held)

        def call():
            if len(names) > 1:
                return self.pool.append_batch({name: arguments(each)[0] for name, each in tokens.items()})
            ids, keys = arguments(tokens[names[0]], len(self.tokens[names[0]]))
            return self.pool.append(names[0], ids, extra_keys=keys)

        if needed > free:
            self.refuses(call, needed, free)
            return
        pairs = call()
        assert pairs == [
            (last, self.pool.block_table(name)[len(tables[name]) - 1]) for name, last in expected
        ]
        for source, target in pairs:
            for offset in range(self.size):
                row = self.memory.get(source * self.size + offset)
                self.memory[target * self.size + offset] = row
        for name, each in tokens.items():
            if each and len(self.tokens[name]) % self.size and name not in dict(expected):
                last = tables[name][-1]  # written in place, so no longer what a committed prefix left there
                self.findable = {key: block for key, block in self.findable.items() if block != last}
            self.tokens[name] += each
        self.hand_out(self.holders().keys() - held.keys())

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), commits=st.booleans())
    def forward(self, data, commits):
        """A forward pass writes the rows of all tokens that were not written yet."""
        name = self.any_sequence(data)
        tokens, slots = self.tokens[name], self.pool.slots(name)
        for position in range(self.written[name], len(tokens)):
            self.memory[slots[position]] = tuple(tokens[: position + 1])
        self.written[name] = len(tokens)
        if commits:
            self.check_commit(name, len(tokens), None)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def commit(self, data):
        name = self.any_sequence(data)
        length = data.draw(st.integers(0, self.written[name]))
        self.check_commit(name, length, length)

    def check_commit(self, name, length, argument):
        before = self.pool.block_table(name)
        self.pool.commit(name, argument)
        length = self.committed[name] = max(length, self.committed[name])
        table = self.pool.block_table(name)
        released = max(before.count(-1), self.first_needed(length))
        assert table == [-1] * released + before[released:]
        if name not in self.stale:
            prefixes = self.prefixes(self.tokens[name], length // self.size)
            # The table before the call: blocks that the window has released by now are found too.
            for prefix, block in [*zip(prefixes, before)][self.offered[name] :]:
                self.findable.setdefault(prefix, block)
            self.offered[name] = max(self.offered[name], len(prefixes))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data):
        name, twin = self.any_sequence(data), next(self.names)
        self.pool.fork(name, twin)
        assert self.pool.block_table(twin) == self.pool.block_table(name)
        self.tokens[twin] = list(self.tokens[name])
        for each in (self.written, self.committed, self.offered):
            each[twin] = each[name]
        if name in self.stale:
            self.stale.add(twin)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data):
        name = self.any_sequence(data)
        length = data.draw(st.integers(0, len(self.tokens[name])))
        released = self.pool.block_table(name).count(-1)
        if self.first_needed(length) < released:
            before = self.read_all(), self.pool.stats()
            with pytest.raises(ValueError, match=r"^`length` must be >= "):
                self.pool.truncate(name, length)
            assert (self.read_all(), self.pool.stats()) == before
            return
        self.pool.truncate(name, length)
        del self.tokens[name][length:]
        self.written[name] = min(length, self.written[name])
        self.committed[name] = min(length, self.committed[name])
        self.offered[name] = min(length // self.size, self.offered[name])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        name = self.any_sequence(data)
        self.pool.free(name)
        del self.tokens[name], self.written[name], self.committed[name]
        self.stale.discard(name)

    @precondition(lambda self: self.findable)
    @rule(again=st.integers(0, 9))
    def reset_prefix_cache(self, again):
        if again == 0:
            self.pool.reset_prefix_cache()
            self.findable = {}
            self.stale = set(self.tokens)

    # What holds after every call.

    @invariant()
    def every_sequence_reads_what_it_wrote(self):
        for name, tokens in self.tokens.items():
            assert self.pool.length(name) == len(tokens)
            slots = self.pool.slots(name)
            for position in range(self.written[name]):
                if slots[position] < 0:
                    assert position // self.size < self.first_needed(self.committed[name])
                else:
                    assert self.memory[slots[position]] == tuple(tokens[: position + 1])

    @invariant()
    def every_block_is_counted_once(self):
        held = self.holders()
        stats = self.pool.stats()
        cached = len(set(self.findable.values()) - held.keys())
        assert stats.used == len(held)
        assert (stats.cached, stats.unused) == (cached, self.num_blocks - len(held) - cached)
        assert stats.sequences == len(self.tokens)
        assert (stats.hits, stats.misses, stats.evictions) == (self.hits, self.misses, self.evictions)
        for name in self.tokens:
            blocks = [block for block in self.pool.block_table(name) if block >= 0]
            assert len(blocks) == len(set(blocks))


def arguments(tokens, start=0):
    """Token ids and extra keys of the model's tokens."""
    keys = {start + position: key for position, (_, key) in enumerate(tokens) if key}
    return [token for token, _ in tokens], keys


TestPool = PoolMachine.TestCase
TestPool.settings = QUICK

if __name__ == "__main__":
    run_state_machine_as_test(PoolMachine, settings=LONG)
