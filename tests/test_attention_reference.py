"""The oracle of attention, against numbers worked out by hand and against matrices with a mask."""

import numpy as np
import pytest

from attending import batch, dense
from kvcache_dpex import reference


def test_by_hand():
    """Scores 0 and ln 3: weights 1/4 and 3/4, denominator 4."""
    query = np.array([1.0, 0.0], "f4").reshape(1, 1, 2)
    key_cache = np.array([[0, 5], [np.log(3), 7], [np.nan, np.nan]], "f4").reshape(1, 3, 1, 2)
    value_cache = np.array([8, 16, np.nan], "f4").reshape(1, 3, 1, 1)
    out, lse = reference.paged_attention(query, key_cache, value_cache, [[0]], [2], scale=1.0)
    np.testing.assert_allclose(out.ravel(), [14], rtol=1e-7)
    np.testing.assert_allclose(lse.ravel(), [np.log(4)], rtol=1e-7)


def test_sink_by_hand():
    """A sink takes a share of the weights, and none of the values: 1/5, 3/5 and 1/5 for the sink."""
    query = np.ones((1, 1, 1), "f4")
    key_cache = np.array([0, np.log(3)], "f4").reshape(1, 2, 1, 1)
    value_cache = np.array([10, 20], "f4").reshape(1, 2, 1, 1)
    out, lse = reference.paged_attention(query, key_cache, value_cache, [[0]], [2], scale=1.0, sinks=[0.0])
    np.testing.assert_allclose([out.item(), lse.item()], [14, np.log(5)], rtol=1e-7)


def test_int8_by_hand():
    """Codes times their scales; the scale of the other slot is NaN and not looked at."""
    query = np.ones((1, 1, 1), "f4")
    codes = np.array([2, 99], "i1").reshape(1, 2, 1, 1)
    scales = np.array([[0.25], [np.nan]], "f4")
    out, lse = reference.paged_attention(
        query, codes, codes, [[0]], [1], key_scales=scales, value_scales=scales, scale=1.0
    )
    assert (out.item(), lse.item()) == (0.5, 0.5)


CASES = {
    "decode": ([5, 1, 8, 9], None),
    "prefill": ([5, 3], [5, 3]),
    "chunked": ([9, 6, 1], [4, 2, 1]),
    "mixed": ([9, 7, 4, 12], [1, 7, 1, 5]),
    "empty sequence": ([3, 0, 4], [1, 0, 2]),
}
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "window": {"sliding_window": 3},
    "window of one": {"sliding_window": 1},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": np.array([0.5, -np.inf, 3, -2], "f4")},
    "all": {"sliding_window": 4, "soft_cap": 2.0, "sinks": np.array([0, 1, 2, 3], "f4"), "scale": 0.4},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_against_matrices(case, options):
    rng = np.random.default_rng(1)
    arguments, starts = batch(rng, *CASES[case], value_head_size=6)
    mine = reference.paged_attention(*arguments, **starts, **OPTIONS[options])
    for own, other in zip(mine, dense(*arguments, **starts, **OPTIONS[options])):
        np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-14)


def test_tokens_that_see_nothing():
    """Zeros and -inf: a sequence of length 0, and queries before the first token of theirs."""
    rng = np.random.default_rng(2)
    (query, *caches, table, _), _ = batch(rng, [4, 4], [3, 1])
    out, lse = reference.paged_attention(
        query, *caches, table, np.array([2, 0]), query_start_loc=np.array([0, 3, 4])
    )
    assert not out[[0, 3]].any()
    assert np.isneginf(lse[[0, 3]]).all()
    assert np.isfinite(lse[1:3]).all()


def test_rows_of_no_sequence_stay():
    rng = np.random.default_rng(3)
    arguments, _ = batch(rng, [3, 2], [2, 2])
    out, lse = np.full((4, 4, 16), 7.0), np.full((4, 4), 7.0)
    reference.paged_attention(*arguments, query_start_loc=np.array([1, 2, 3]), out=out, lse=lse)
    assert (out[[0, 3]] == 7).all()
    assert (lse[[0, 3]] == 7).all()
    assert (lse[1:3] != 7).all()


def test_blocks_that_are_not_there():
    """Positions without a block are left out: negative, beyond the cache, behind the block table."""
    rng = np.random.default_rng(4)
    (query, *caches, table, _), _ = batch(rng, [12], surplus=0)
    table[0, 1] = -1
    whole = reference.paged_attention(query, *caches, table, [12])
    table[0, 1] = len(caches[0])
    for own, other in zip(reference.paged_attention(query, *caches, table, [12]), whole):
        np.testing.assert_array_equal(own, other)
    beyond = reference.paged_attention(query, *caches, table[:, :1], [12])
    first = reference.paged_attention(query, *caches, table[:, :1], [4])
    np.testing.assert_array_equal(beyond[0], first[0])


def test_merged_states_are_attention_to_all():
    """Attention to the first half and to the second, merged; also where one or both see nothing."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((10, 8)) for _ in range(3))
    halves = [reference.softmax_sum(k[part] @ q[0], v[part]) for part in (slice(5), slice(5, None))]
    nothing = reference.softmax_sum(np.zeros(0), v[:0])
    whole = reference.softmax_sum(k @ q[0], v)
    for a, b, both in ((*halves, whole), (halves[0], nothing, halves[0]), (nothing, nothing, nothing)):
        out, lse = reference.merge_attention_states(
            a[0][None, None], np.full((1, 1), a[1]), b[0][None, None], np.full((1, 1), b[1])
        )
        np.testing.assert_allclose(out[0, 0], both[0], rtol=1e-12)
        np.testing.assert_allclose(lse.item(), both[1], rtol=1e-12)
