"""BlockPool's prefix cache: what is found, what is not, what is evicted; hashes."""

from hashlib import sha256
from struct import pack

import numpy as np
import pytest

from helpers import output_of
from kvcache_dpex.blocks import BlockPool, block_hashes

PROMPT = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32]  # two blocks of 4 and a half


def pool_of(num_blocks=8, block_size=4, **options):
    return BlockPool(num_blocks, block_size, **options)


def committed(pool, name, tokens, **options):
    """Allocate, as if a forward pass had written all tokens."""
    prefix = pool.allocate(name, tokens, **options)
    pool.commit(name)
    return prefix


@pytest.mark.parametrize(
    "tokens", [PROMPT, tuple(PROMPT), np.array(PROMPT, "int32"), (token for token in PROMPT)]
)
def test_token_ids_of_any_kind(tokens):
    pool = pool_of()
    committed(pool, "a", tokens)
    assert pool.find_prefix(PROMPT) == 8


def test_a_committed_prefix_is_shared():
    pool = pool_of()
    committed(pool, "a", PROMPT)
    assert pool.allocate("b", [*PROMPT[:8], 7, 8, 9]) == 8
    assert (pool.block_table("a"), pool.block_table("b")) == ([0, 1, 2], [0, 1, 3])
    assert pool.stats()[-3:] == (2, 2, 0)  # hits, misses (of the first prompt), evictions


def test_nothing_is_shared_before_it_is_committed():
    """A forward pass that failed must not leave blocks that others take for written."""
    pool = pool_of(12)
    pool.allocate("a", PROMPT)
    assert pool.allocate("b", PROMPT) == 0
    pool.commit("a", 7)  # the second block lacks a token
    assert pool.allocate("c", PROMPT) == 4


def test_a_prompt_found_whole_computes_its_last_block():
    """The model must see the last token to predict the next one."""
    pool = pool_of()
    committed(pool, "a", PROMPT[:8])
    assert pool.allocate("b", PROMPT[:8]) == 4
    assert pool.block_table("b") == [0, 2]
    pool.commit("b")  # its second block has the contents of a block that is found already
    pool.free("a")
    pool.free("b")
    assert pool.stats()[1:4] == (0, 2, 6)
    assert pool.allocate("c", PROMPT[:9]) == 8


def test_partly_filled_blocks_are_not_cached():
    pool = pool_of()
    committed(pool, "a", PROMPT)
    pool.free("a")
    assert pool.stats()[1:4] == (0, 2, 6)


def test_a_block_depends_on_all_that_is_before_it():
    pool = pool_of()
    committed(pool, "a", PROMPT)
    assert pool.find_prefix([0, *PROMPT[1:]]) == 0
    assert pool.find_prefix([*PROMPT[:7], 0, 0]) == 4


def test_extra_keys_keep_adapters_and_images_apart():
    pool = pool_of(32)
    committed(pool, "a", PROMPT, extra_keys={0: "adapter", 6: b"image"})
    assert pool.find_prefix(PROMPT) == 0
    assert pool.find_prefix(PROMPT, extra_keys={0: "other", 6: b"image"}) == 0
    assert pool.find_prefix(PROMPT, extra_keys={0: "adapter"}) == 4
    assert pool.find_prefix(PROMPT, extra_keys={0: "adapter", 5: b"image"}) == 4
    assert pool.find_prefix(PROMPT, extra_keys={0: "adapter", 6: "image", 8: "later"}) == 8
    pool.allocate("b", PROMPT[:6])
    pool.append("b", PROMPT[6:], extra_keys={6: "image"})
    pool.commit("b")
    assert pool.find_prefix(PROMPT, extra_keys={6: "image"}) == 8


def test_keys_that_join_to_the_same_bytes_differ():
    """The length of a key is hashed with it."""
    hashes = {
        tuple(block_hashes([1, 2], 2, keys))
        for keys in (None, {0: "ab"}, {1: "ab"}, {0: "a", 1: "b"}, {0: "", 1: "ab"}, {0: "ab", 1: ""})
    }
    assert len(hashes) == 6


def test_max_prefix_limits_what_is_taken():
    pool = pool_of(12)
    committed(pool, "a", PROMPT)
    assert [pool.find_prefix(PROMPT, max_prefix=most) for most in (0, 3, 4, 7, 8, 99)] == [0, 0, 4, 4, 8, 8]
    assert pool.allocate("b", PROMPT, max_prefix=0) == 0
    assert not set(pool.block_table("a")) & set(pool.block_table("b"))


def test_sequences_without_ids_take_no_part():
    pool = pool_of()
    pool.allocate("a", 8)
    pool.commit("a")
    pool.free("a")
    assert pool.stats().cached == 0
    assert pool.find_prefix(9) == 0


def test_a_free_block_is_taken_back_with_its_contents():
    """MinivLLM #87: a hit on a free block must revive it, and hand it to nobody else."""
    pool = pool_of(4)
    committed(pool, "a", PROMPT)
    pool.free("a")
    assert pool.allocate("b", [*PROMPT[:8], 1]) == 8
    assert pool.block_table("b")[:2] == [0, 1]
    pool.allocate("c", 4)
    assert not {0, 1} & set(pool.block_table("c"))


def test_a_block_with_new_contents_is_not_found_by_the_old():
    """vLLM #49449, kvcached #362: the hash of a block must go when the block is handed out again."""
    pool = pool_of(3)
    committed(pool, "a", PROMPT)
    pool.free("a")
    pool.allocate("b", 12)
    assert pool.find_prefix(PROMPT) == 0
    pool.free("b")
    assert pool.find_prefix(PROMPT) == 0
    assert pool.stats()[-3:] == (0, 2, 2)


def test_a_block_rewritten_in_place_is_not_found_by_the_old():
    """Speculative decoding cuts into a committed block and fills it with other tokens."""
    pool = pool_of()
    committed(pool, "a", PROMPT[:8])
    pool.truncate("a", 6)
    assert pool.find_prefix([*PROMPT[:8], 0]) == 8  # still there
    pool.append("a", [99, 98])
    assert pool.find_prefix([*PROMPT[:8], 0]) == 4
    pool.commit("a")
    assert pool.find_prefix([*PROMPT[:6], 99, 98, 0]) == 8


def test_a_rejected_draft_is_never_found():
    pool = pool_of()
    committed(pool, "a", PROMPT[:6])
    pool.append("a", [1, 2, 3])
    pool.truncate("a", 7)  # one of three was accepted
    pool.commit("a")
    pool.append("a", [5])
    pool.commit("a")
    assert pool.find_prefix([*PROMPT[:6], 1, 2, 3]) == 4
    assert pool.find_prefix([*PROMPT[:6], 1, 5, 3]) == 8


def test_a_commit_after_truncation_counts_from_there():
    pool = pool_of()
    committed(pool, "a", PROMPT[:8])
    pool.truncate("a", 4)
    pool.append("a", [1, 2, 3, 4])
    pool.commit("a", 5)
    assert pool.find_prefix([*PROMPT[:4], 1, 2, 3, 4, 0]) == 4
    pool.commit("a")
    pool.commit("a", 0)  # what was committed stays so
    assert pool.find_prefix([*PROMPT[:4], 1, 2, 3, 4, 0]) == 8


def test_truncation_drops_the_extra_keys_behind_it():
    pool = pool_of()
    pool.allocate("a", PROMPT[:8], extra_keys={6: "image"})
    pool.truncate("a", 6)
    pool.append("a", PROMPT[6:8])
    pool.commit("a")
    assert pool.find_prefix(PROMPT) == 8


def test_forks_go_their_own_ways():
    pool = pool_of(12)
    committed(pool, "a", PROMPT)
    pool.fork("a", "b")
    pool.append("a", [1, 2], extra_keys={10: "image"})
    pool.append("b", [3, 4, 5, 6])
    pool.append("b", [7, 8])
    for name in "ab":
        pool.commit(name)
    assert pool.find_prefix([*PROMPT, 1, 2, 0], extra_keys={10: "image"}) == 12
    assert pool.find_prefix([*PROMPT, 3, 4, 5, 6, 7, 8, 0]) == 16


def test_preemption_keeps_what_was_computed():
    pool = pool_of()
    committed(pool, "a", PROMPT)
    pool.free("a")
    assert pool.allocate("a", PROMPT) == 8


def test_a_reset_forgets_prefixes_of_running_sequences_too():
    """Blocks that old weights filled must not be found, now or when the sequence is committed later."""
    pool = pool_of(16)
    committed(pool, "a", PROMPT[:9])
    pool.fork("a", "b")
    committed(pool, "done", [5] * 9)
    pool.free("done")
    pool.reset_prefix_cache()
    assert pool.stats()[1:4] == (3, 0, 13)
    for name in "ab":
        pool.append(name, [1, 2, 3, 4])
        pool.commit(name)
    assert pool.find_prefix([*PROMPT[:9], 1, 2, 3, 4]) == 0
    assert committed(pool, "new", PROMPT[:9]) == 0
    assert pool.find_prefix([*PROMPT[:9], 1, 2, 3, 4]) == 8  # of new, and not what a and b appended


def test_a_reset_forgets_prefixes_of_sequences_that_are_away():
    """A sequence that was in host memory meanwhile must not share what new weights filled."""
    pool = pool_of(16)
    committed(pool, "a", PROMPT[:9])
    away = pool.detach("a")
    pool.reset_prefix_cache()
    committed(pool, "new", PROMPT[:9])
    assert pool.attach("a", away) == [0, 1, 2]
    assert not {*pool.block_table("a")} & {*pool.block_table("new")}


# Eviction.


def test_unused_blocks_go_first_then_the_least_recently_used():
    pool = pool_of(6, 1)
    committed(pool, "a", [1, 2])
    committed(pool, "b", [3, 4])
    pool.free("b")
    pool.free("a")
    pool.allocate("c", 2)
    assert set(pool.block_table("c")) == {4, 5}
    assert pool.stats().evictions == 0
    pool.append("c", 1)
    assert pool.block_table("c")[2] == 3  # the last block of b, which was freed first
    pool.append("c", 2)
    assert pool.block_table("c")[3:] == [2, 1]
    assert pool.find_prefix([1, 2, 0]) == 1


def test_a_hit_makes_a_prefix_recent():
    pool = pool_of(4, 1)
    committed(pool, "a", [1, 2])
    committed(pool, "b", [3, 4])
    pool.free("a")
    pool.free("b")
    assert pool.allocate("a", [1, 2, 5], max_prefix=2) == 2
    pool.free("a")
    pool.allocate("c", 3)
    assert [pool.find_prefix([token, 0]) for token in (1, 3)] == [1, 0]


def test_a_window_needs_only_the_end_of_a_prefix():
    pool = pool_of(6, sliding_window=4)
    tokens = list(range(13))
    committed(pool, "a", tokens)
    assert pool.block_table("a") == [-1, -1, 2, 3]
    pool.allocate("b", 16)  # takes the released blocks, the oldest contents
    pool.free("a")
    assert pool.allocate("c", tokens) == 12
    assert pool.block_table("c")[:3] == [-1, -1, 2]


def test_a_gap_in_the_window_ends_a_prefix():
    pool = pool_of(5, 1, sliding_window=3)
    pool.allocate("a", [1, 2, 3])
    pool.commit("a", 2)
    assert pool.find_prefix([1, 2, 3, 4]) == 2
    pool.commit("a")
    assert pool.find_prefix([1, 2, 3, 4]) == 3
    pool.free("a")
    pool.allocate("b", 3)  # two unused blocks, and the one that the window released first
    assert pool.find_prefix([1, 2, 3, 4]) == 3
    pool.append("b", 1)
    assert pool.find_prefix([1, 2, 3, 4]) == 0


# Hashes.


def test_hashes_are_the_same_in_every_process():
    """Routers and other machines compute them too; Python's own hash differs from process to process."""
    code = "from kvcache_dpex.blocks import block_hashes as h; print(h([1, -2, 3], 2, {1: 'x'})[0].hex())"
    found = output_of(code)
    assert found == block_hashes([1, -2], 2, {1: b"x"})[0].hex()
    root = sha256(b"kvcache_dpex.blocks 1 " + pack("<q", 2)).digest()
    assert found == sha256(root + pack("<qqqq", 1, -2, 1, 1) + b"x").hexdigest()


def test_hashes_of_other_block_sizes_never_match():
    assert not set(block_hashes([0] * 8, 2)) & set(block_hashes([0] * 8, 4))


def test_a_pool_finds_what_block_hashes_names():
    pool = pool_of()
    committed(pool, "a", PROMPT)
    assert [pool._blocks.block_of[digest] for digest in block_hashes(PROMPT, 4)] == [0, 1]
