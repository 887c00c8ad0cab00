"""What BlockPool says when a call is refused; nothing has then changed."""

import re

import numpy as np
import pytest

from kvcache_dpex.blocks import BlockPool, OutOfBlocks, block_hashes


@pytest.fixture
def pool():
    """Four blocks of 4: "ids" and its fork "twin" share two, "number" has one, one is free."""
    pool = BlockPool(4, 4)
    pool.allocate("ids", [1, 2, 3, 4, 5])
    pool.commit("ids")
    pool.fork("ids", "twin")
    pool.allocate("number", 3)
    return pool


def state_of(pool):
    return pool.stats(), {name: (pool.length(name), pool.block_table(name)) for name in pool.sequences}


def assert_refused(pool, call, error, message):
    """The same error each time, with exactly this text, and the pool as it was."""
    before = state_of(pool)
    for _ in range(2):
        with pytest.raises(error, match=f"^{re.escape(message)}$") as raised:
            call(pool)
        assert type(raised.value) is error
        assert state_of(pool) == before
    return raised.value


FREED = "`{}` must be in the pool, got 'gone'; it was freed or never allocated"


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda pool: pool.free("gone"), "sequence"),
        (lambda pool: pool.append("gone", 1), "sequence"),
        (lambda pool: pool.append_batch({"number": 1, "gone": 1}), "sequence"),
        (lambda pool: pool.commit("gone"), "sequence"),
        (lambda pool: pool.truncate("gone", 0), "sequence"),
        (lambda pool: pool.fork("gone", "new"), "source"),
        (lambda pool: pool.block_table("gone"), "sequence"),
        (lambda pool: pool.slots("gone"), "sequence"),
        (lambda pool: pool.length("gone"), "sequence"),
    ],
)
def test_a_sequence_that_was_freed(pool, call, argument):
    """Double free and use after free name the sequence."""
    pool.fork("twin", "gone")
    pool.free("gone")
    assert_refused(pool, call, ValueError, FREED.format(argument))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda pool: pool.allocate([1], 1), "sequence"),
        (lambda pool: pool.free([1]), "sequence"),
        (lambda pool: pool.fork([1], "new"), "source"),
        (lambda pool: pool.fork("ids", [1]), "target"),
    ],
)
def test_a_name_that_is_not_hashable(pool, call, argument):
    assert_refused(pool, call, TypeError, f"`{argument}` must be hashable, got list")


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda pool: pool.allocate("ids", 1), "sequence"),
        (lambda pool: pool.fork("number", "ids"), "target"),
        (lambda pool: pool.fork("ids", "ids"), "target"),
    ],
)
def test_a_name_that_is_taken(pool, call, argument):
    message = f"`{argument}` must be new to the pool, got 'ids'; free it first"
    assert_refused(pool, call, ValueError, message)


PREEMPT = "free or truncate a sequence, or free one now and allocate it again later (preemption)"


@pytest.mark.parametrize(
    ("call", "what", "needed", "free"),
    [
        (lambda pool: pool.allocate("new", 5), "sequence 'new'", 2, 1),
        (lambda pool: pool.allocate("new", [1, 2, 3, 4, *range(8)]), "sequence 'new'", 2, 1),
        (lambda pool: pool.append("number", 6), "appending to sequence 'number'", 2, 1),
        (lambda pool: pool.append("ids", [6] * 4), "appending to sequence 'ids'", 2, 1),  # one is a copy
        (lambda pool: pool.append_batch({"ids": [1], "number": 2}), "appending to 2 sequences", 2, 1),
    ],
)
def test_too_few_free_blocks(pool, call, what, needed, free):
    message = f"{what} needs {needed} blocks, but {free} of 4 are free; {PREEMPT}"
    raised = assert_refused(pool, call, OutOfBlocks, message)
    assert (raised.needed, raised.free) == (needed, free)


def test_more_blocks_than_the_pool_has(pool):
    message = (
        "sequence 'new' needs 5 blocks, but 1 of 4 are free; create the pool with `num_blocks` >= 5, or "
        "append in smaller parts"
    )
    assert_refused(pool, lambda pool: pool.allocate("new", 17), OutOfBlocks, message)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda pool: pool.append("ids", 2),
            TypeError,
            "`tokens` must be token ids, as when sequence 'ids' was allocated, got int",
        ),
        (
            lambda pool: pool.append_batch({"ids": [1], "number": [2]}),
            TypeError,
            "`tokens` must be a number of tokens, as when sequence 'number' was allocated, got list",
        ),
        (lambda pool: pool.append("number", -1), ValueError, "`tokens` must be >= 0, got -1"),
        (lambda pool: pool.append("number", True), TypeError, "`tokens` must be an int, got bool"),
        (
            lambda pool: pool.append("ids", "text"),
            TypeError,
            "`tokens` must be a sequence of ints or a number of tokens, got str",
        ),
        (
            lambda pool: pool.append("ids", [1, 2**63]),
            ValueError,
            "`tokens` must be ids that fit in 64 bits, got a larger one",
        ),
        (
            lambda pool: pool.append("ids", [6], extra_keys={4: "image"}),
            ValueError,
            "`extra_keys` must be at positions of these tokens, 5 <= position < 6, got 4",
        ),
        (
            lambda pool: pool.allocate("new", [6], extra_keys={1: "image"}),
            ValueError,
            "`extra_keys` must be at positions of these tokens, 0 <= position < 1, got 1",
        ),
        (
            lambda pool: pool.find_prefix([6], extra_keys={0: 7}),
            TypeError,
            "`extra_keys[0]` must be str or bytes, got int",
        ),
        (
            lambda pool: pool.find_prefix([6], max_prefix=-1),
            ValueError,
            "`max_prefix` must be >= 0, got -1",
        ),
        (
            lambda pool: pool.find_prefix(6, max_prefix="all"),
            TypeError,
            "`max_prefix` must be an int, got str",
        ),
        (
            lambda pool: pool.commit("ids", 6),
            ValueError,
            "`length` must be <= 5, the length of sequence 'ids', got 6",
        ),
        (
            lambda pool: pool.truncate("ids", 6),
            ValueError,
            "`length` must be <= 5, the length of sequence 'ids', got 6",
        ),
        (lambda pool: pool.truncate("ids", -1), ValueError, "`length` must be >= 0, got -1"),
        (
            lambda pool: pool.slots("ids", 0, 6),
            ValueError,
            "`stop` must be <= 5, the length of sequence 'ids', got 6",
        ),
        (
            lambda pool: pool.slots("ids", 6),
            ValueError,
            "`start` must be <= 5, the length of sequence 'ids', got 6",
        ),
        (lambda pool: pool.slots("ids", -1), ValueError, "`start` must be >= 0, got -1"),
    ],
)
def test_wrong_arguments(pool, call, error, message):
    assert_refused(pool, call, error, message)


@pytest.mark.parametrize("tokens", [None, [1.0], np.ones(2), [[1]], [None]])
def test_tokens_that_are_no_ints(pool, tokens):
    """The rest of the message is Python's, which names the type that it met."""
    before = state_of(pool)
    for call in (lambda: pool.append("ids", tokens), lambda: pool.allocate("new", tokens)):
        with pytest.raises(TypeError, match=r"^`tokens` must be a sequence of ints or a number of tokens: "):
            call()
    assert state_of(pool) == before


def test_a_truncation_into_what_the_window_released():
    pool = BlockPool(4, 4, sliding_window=5)
    pool.allocate("a", 12)
    pool.commit("a")
    pool.append("a", 2)
    message = (
        "`length` must be >= 12, as the sliding window of 5 has released the first 2 blocks of sequence "
        "'a', got 11; free the sequence and allocate its tokens again"
    )
    assert_refused(pool, lambda pool: pool.truncate("a", 11), ValueError, message)
    pool.truncate("a", 12)
    assert pool.length("a") == 12


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((-1, 4), {}, ValueError, "`num_blocks` must be >= 0, got -1"),
        ((4, 0), {}, ValueError, "`block_size` must be >= 1, got 0"),
        ((4.0, 4), {}, TypeError, "`num_blocks` must be an int, got float"),
        ((4, 4), {"sliding_window": 0}, ValueError, "`sliding_window` must be >= 1, got 0"),
        ((4, 4), {"sliding_window": 2.5}, TypeError, "`sliding_window` must be an int, got float"),
    ],
)
def test_a_pool_of_wrong_sizes(arguments, options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        BlockPool(*arguments, **options)


def test_block_hashes_refuse_what_a_pool_refuses():
    with pytest.raises(ValueError, match=r"^`block_size` must be >= 1, got 0$"):
        block_hashes([1], 0)
    with pytest.raises(
        TypeError, match=r"^`tokens` must be a sequence of ints or a number of tokens, got bytes$"
    ):
        block_hashes(b"12345678", 1)
