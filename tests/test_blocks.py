"""BlockPool: what each call does to block tables and counts."""

import pytest

from kvcache_dpex.blocks import BlockPool, OutOfBlocks

PROMPT = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32]  # two blocks of 4 and a half


def pool_of(num_blocks=8, block_size=4, **options):
    return BlockPool(num_blocks, block_size, **options)


def committed(pool, name, tokens, **options):
    """Allocate, as if a forward pass had written all tokens."""
    prefix = pool.allocate(name, tokens, **options)
    pool.commit(name)
    return prefix


# Tables and slots.


def test_a_sequence_grows_by_blocks_only_when_needed():
    pool = pool_of()
    assert pool.allocate("a", 3) == 0
    assert (pool.block_table("a"), pool.slots("a"), pool.length("a")) == ([0], [0, 1, 2], 3)
    assert pool.append("a", 1) == []
    assert pool.block_table("a") == [0]
    assert pool.append("a", 6) == []
    assert pool.block_table("a") == [0, 1, 2]
    assert pool.slots("a", 3, 9) == [3, 4, 5, 6, 7, 8]
    assert pool.slots("a", 10) == pool.append("a", 0) == []


def test_an_empty_sequence_takes_no_block():
    pool = pool_of(0)
    assert pool.allocate("a", []) == 0
    assert (pool.block_table("a"), pool.slots("a"), pool.num_free) == ([], [], 0)
    assert pool.stats().utilisation == 0.0
    pool.fork("a", "b")
    pool.commit("b")
    pool.truncate("b", 0)
    pool.free("a")
    assert pool.sequences == ("b",)


def test_tables_are_copies():
    pool = pool_of()
    pool.allocate("a", 5)
    pool.block_table("a").clear()
    assert pool.block_table("a") == [0, 1]


def test_blocks_come_back_a_thousand_times():
    """Wenyueh/MinivLLM #70: a count of 0 at hand-out leaks the block."""
    pool = pool_of(4)
    for _ in range(1000):
        pool.allocate("a", 16)
        assert sorted(pool.block_table("a")) == [0, 1, 2, 3]
        pool.free("a")
    assert pool.num_free == pool.stats().unused == 4


# Forks and copies.


def test_one_copy_for_two_writers():
    """xLLM-AI/xllm #1984: a shared, partly filled block is copied before the first of two writes to it."""
    pool = pool_of()
    pool.allocate("a", 6)
    pool.fork("a", "b")
    assert pool.append("a", 1) == [(1, 2)]
    assert pool.append("b", 1) == []
    assert (pool.block_table("a"), pool.block_table("b")) == ([0, 2], [0, 1])


def test_full_shared_blocks_are_not_copied():
    pool = pool_of()
    pool.allocate("a", 8)
    pool.fork("a", "b")
    assert pool.append("a", 1) == pool.append("b", 1) == []
    assert (pool.block_table("a"), pool.block_table("b")) == ([0, 1, 2], [0, 1, 3])


def test_a_batch_of_forks_copies_for_all_but_one():
    pool = pool_of(4)
    pool.allocate("a", 3)
    for name in "bcd":
        pool.fork("a", name)
    assert pool.append_batch(dict.fromkeys("abcd", 1)) == [(0, 1), (0, 2), (0, 3)]
    assert pool.num_free == 0


def test_a_shared_block_that_was_cut_back_is_copied_too():
    """Truncation leaves a full shared block partly filled: the fork still reads the rest of it."""
    pool = pool_of()
    pool.allocate("a", 8)
    pool.fork("a", "b")
    pool.truncate("a", 6)
    assert pool.append("a", 1) == [(1, 2)]
    assert pool.block_table("b") == [0, 1]


def test_forks_with_a_window_free_each_block_once():
    """vLLM #1556: shared blocks of sequences longer than their window were freed twice."""
    pool = pool_of(sliding_window=8)
    committed(pool, "a", list(range(12)))
    pool.fork("a", "b")
    for name in "ab":
        pool.append(name, [1, 2, 3, 4])
        pool.commit(name)
    pool.free("a")
    pool.free("b")
    stats = pool.stats()
    assert (stats.used, pool.num_free) == (0, 8)
    pool.allocate("all", 32)
    assert sorted(pool.block_table("all")) == list(range(8))


def test_a_fork_holds_no_block_that_the_window_released():
    """vLLM #20512: the fork of a sequence took up released blocks that belonged to another by then."""
    pool = pool_of(4, sliding_window=4)
    pool.allocate("a", 12)
    pool.commit("a")
    pool.allocate("other", 8)
    pool.fork("a", "b")
    assert pool.block_table("b") == [-1, -1, 2]
    assert pool.block_table("other") == [0, 1]


# Windows and truncation.


def test_a_window_releases_what_no_later_token_sees():
    """A window of 5 at position 12 begins at 8: blocks 0 and 1 go, one position earlier only block 0."""
    pool = pool_of(sliding_window=5)
    pool.allocate("a", 11)
    pool.commit("a")
    assert pool.block_table("a") == [-1, 1, 2]
    pool.append("a", 1)
    assert pool.block_table("a") == [-1, 1, 2]
    pool.commit("a")
    assert pool.block_table("a") == [-1, -1, 2]
    assert pool.slots("a", 6) == [-1, -1, 8, 9, 10, 11]
    assert pool.length("a") == 12


def test_a_prompt_in_chunks_takes_no_more_than_its_window():
    pool = pool_of(3, sliding_window=4)
    pool.allocate("a", 4)
    for _ in range(50):
        pool.commit("a")
        pool.append("a", 4)
    assert pool.length("a") == 204
    assert pool.stats().used <= 3


def test_truncation_gives_blocks_back_and_positions_go_on():
    pool = pool_of()
    pool.allocate("a", 11)
    pool.truncate("a", 5)
    assert (pool.block_table("a"), pool.num_free) == ([0, 1], 6)
    pool.append("a", 4)
    assert pool.slots("a", 4) == [4, 5, 6, 7, 8]
    pool.truncate("a", 0)
    assert (pool.block_table("a"), pool.num_free) == ([], 8)


# All or nothing.


def test_blocks_that_a_prompt_shares_are_not_free_for_it():
    """Two free blocks, both of which the prompt itself takes back, leave none for its third."""
    pool = pool_of(3)
    committed(pool, "a", PROMPT[:8])
    pool.free("a")
    pool.allocate("b", 4)
    with pytest.raises(OutOfBlocks):
        pool.allocate("c", PROMPT)
    assert pool.find_prefix(PROMPT) == 8
    assert (pool.num_free, pool.sequences) == (2, ("b",))


def test_a_batch_is_appended_whole_or_not_at_all():
    pool = pool_of(3)
    pool.allocate("a", 4)
    pool.allocate("b", 4)
    with pytest.raises(OutOfBlocks):
        pool.append_batch({"a": 1, "b": 1})
    assert [pool.length(name) for name in "ab"] == [4, 4]
    assert [pool.block_table(name) for name in "ab"] == [[0], [1]]
    assert pool.append_batch({"a": 4}) == []


def test_grow():
    """New blocks are handed out after those that were unused, and count as free."""
    pool = BlockPool(num_blocks=2, block_size=4)
    pool.allocate("a", 5)
    with pytest.raises(OutOfBlocks):
        pool.append("a", 4)
    pool.grow(3)
    assert (pool.num_blocks, pool.num_free) == (5, 3)
    pool.append("a", 12)
    assert pool.block_table("a") == [0, 1, 2, 3, 4]
    pool.free("a")
    pool.grow(0)
    assert pool.stats()[:4] == (5, 0, 0, 5)
    pool.grow(1)
    pool.allocate("b", 24)
    assert sorted(pool.block_table("b")) == list(range(6))
    with pytest.raises(ValueError, match="`count` must be"):
        pool.grow(-1)
