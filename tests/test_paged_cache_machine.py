"""PagedCache over random calls with real writes: every sequence reads back exactly what was appended.

``python tests/test_paged_cache_machine.py`` runs many more steps.
"""

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

from caching import FORMATS, KINDS, advance, assert_holds, new_cache
from kvcache_dpex import OutOfBlocks
from kvcache_dpex.runtime.environment import devices

TOKENS = st.lists(st.integers(0, 1), max_size=6)


def machine(kind, format):
    class CacheMachine(RuleBasedStateMachine):
        @initialize(
            num_blocks=st.integers(3, 9), block_size=st.sampled_from([2, 1, 3]), host=st.integers(0, 6)
        )
        def create(self, num_blocks, block_size, host):
            self.cache = new_cache(
                kind,
                format,
                devices.queue_for(),
                num_blocks=num_blocks,
                block_size=block_size,
                num_host_blocks=host,
            )
            self.held, self.swapped = {}, {}
            self.names = iter(range(10**9))

        def any_of(self, data, names):
            return data.draw(st.sampled_from(sorted(names)))

        def all_or_nothing(self, call):
            """Whether a call found the blocks that it needs; if not, nothing has changed."""
            before = {name: self.cache.pool.block_table(name) for name in self.held}
            used = self.cache.pool.stats().used, self.cache._host_blocks.num_free
            try:
                call()
            except OutOfBlocks:
                assert before == {name: self.cache.pool.block_table(name) for name in self.cache.sequences}
                assert used == (self.cache.pool.stats().used, self.cache._host_blocks.num_free)
                return False
            return True

        @rule(data=st.data(), new=st.integers(0, 2))
        def step(self, data, new):
            """Tokens of several sequences, old and new ones; prompts often begin alike."""
            some = st.lists(st.sampled_from(sorted(self.held)), max_size=3, unique=True)
            names = [*(data.draw(some) if self.held else []), *(next(self.names) for _ in range(new))]
            tokens = {name: data.draw(TOKENS) for name in data.draw(st.permutations(names))}
            if tokens and self.all_or_nothing(lambda: advance(self.cache, tokens, self.held)):
                for name, each in tokens.items():
                    self.held[name] = [*self.held.get(name, []), *each]

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def fails(self, data):
            """A step that ends with an error, or without a layer."""
            names = [self.any_of(data, self.held), next(self.names)]
            with pytest.raises((RuntimeError, OutOfBlocks)), self.cache.step({each: [0] for each in names}):
                pass

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def fork(self, data):
            name, twin = self.any_of(data, self.held), next(self.names)
            self.cache.fork(name, twin)
            self.held[twin] = list(self.held[name])

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def crop(self, data):
            name = self.any_of(data, self.held)
            length = data.draw(st.integers(0, len(self.held[name])))
            self.cache.crop(name, length)
            del self.held[name][length:]

        @precondition(lambda self: self.held or self.swapped)
        @rule(data=st.data())
        def free(self, data):
            name = self.any_of(data, [*self.held, *self.swapped])
            self.cache.free(name)
            self.held.pop(name, None)
            self.swapped.pop(name, None)

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def swap_out(self, data):
            name = self.any_of(data, self.held)
            if self.all_or_nothing(lambda: self.cache.swap_out(name)):
                self.swapped[name] = self.held.pop(name)

        @precondition(lambda self: self.swapped)
        @rule(data=st.data())
        def swap_in(self, data):
            name = self.any_of(data, self.swapped)
            if self.all_or_nothing(lambda: self.cache.swap_in(name)):
                self.held[name] = self.swapped.pop(name)

        @precondition(lambda self: self.held)
        @rule(data=st.data())
        def export_and_import(self, data):
            name, twin = self.any_of(data, self.held), next(self.names)
            content = self.cache.export_sequence(name)
            if self.all_or_nothing(lambda: self.cache.import_sequence(twin, content)):
                self.held[twin] = list(self.held[name])

        @invariant()
        def every_sequence_reads_what_was_appended(self):
            assert_holds(self.cache, self.held)
            assert self.cache.swapped == tuple(self.swapped)

        @invariant()
        def no_block_leaks(self):
            held = {block for name in self.held for block in self.cache.pool.block_table(name)}
            assert self.cache.pool.stats().used == len(held)
            count = sum(-(-len(tokens) // self.cache.block_size) for tokens in self.swapped.values())
            host = self.cache._host_blocks
            assert len(host.references) - host.num_free == count

    return CacheMachine


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(kind, format, queue):
    quick = settings(max_examples=8, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine(kind, format), settings=quick)


if __name__ == "__main__":
    long = settings(
        max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    for each in KINDS:
        for name in FORMATS:
            run_state_machine_as_test(machine(each, name), settings=long)
