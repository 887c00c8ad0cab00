"""slot_mapping, get_batch_indices_positions and append_paged_kv_cache against the oracle."""

import numpy as np
import pytest

import kvcache_dpex as kv
from helpers import Twins, random_bits, sentinel, to_device
from kvcache_dpex import layout, reference
from kvcache_dpex.runtime.launch import arrays

INDEX = ["i4", "i8"]


@pytest.fixture
def rng():
    return np.random.default_rng(12)


def check(queue, table, positions, block_size, *, out="i8", **options):
    """Slots in an array of their own, and what the oracle says."""
    given = {name: each for name, each in options.items() if isinstance(each, np.ndarray)}
    numbers = {name: each for name, each in options.items() if name not in given}
    wide = sentinel((2 * len(positions),), out)
    twins = Twins(queue)
    views = {name: twins.view(each) for name, each in given.items()}
    kv.slot_mapping(
        twins.view(table), twins.view(positions), block_size, out=twins.view(wide[::2]), **views, **numbers
    )
    wanted = reference.slot_mapping(table, positions, block_size, **options)
    wide[::2] = np.where(wanted <= np.iinfo(out).max, wanted, -1)
    twins.assert_equal()
    return wanted


@pytest.mark.parametrize("out", INDEX)
@pytest.mark.parametrize("position", INDEX)
@pytest.mark.parametrize("table", INDEX)
def test_every_type(runner, queue, table, position, out):
    limit = np.iinfo(position).max
    blocks = np.array([[7, 2, -1], [5, 2**30, 1], [2**31 - 1, 0, 9]], table)
    positions = np.array([0, 31, 32, 47, 48, -1, 3, 20, limit, 2, 40], position)
    starts = np.array([0, 5, 9, 10], table)
    wanted = check(queue, blocks, positions, 16, query_start_loc=starts, out=out)
    assert wanted[:6].tolist() == [112, 47, -1, -1, -1, -1]
    assert wanted[-1] == -1
    assert wanted[7] == 2**34 + 4


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_token_of_each_sequence(runner, queue, rng, block_size):
    table = rng.permutation(24).reshape(4, 6).astype("i4")[:, ::2]
    positions = rng.integers(0, 3 * block_size, 4)
    wanted = check(queue, table, positions, block_size)
    for row, position, slot in zip(table, positions, wanted):
        assert layout.slots_of_sequence(row, position, position + 1, block_size) == [slot]


@pytest.mark.parametrize("num_sinks", [0, 3])
@pytest.mark.parametrize("window", [1, 5, 8])
def test_rings_keep_the_newest_and_the_sinks(runner, queue, rng, window, num_sinks):
    """After any chunks of a sequence, the ring holds exactly its newest tokens, and the sinks."""
    table, kept = np.array([[4, 1, 3, 0]], "i4"), np.full(20, -1)
    start = 0
    for count in (1, 2, 11, 4, 1, 9):
        positions = np.arange(start, start + count)
        start += count
        options = {"window": window, "num_sinks": num_sinks, "seq_lens": np.array([start], "i4")}
        slots = check(queue, table, positions, 4, batch_indices=np.zeros(count, "i4"), **options)
        written = slots[slots >= 0]
        assert len(set(written)) == len(written)
        kept[written] = positions[slots >= 0]
        newest = {*range(min(start, num_sinks)), *range(max(num_sinks, start - window), start)}
        assert set(kept[kept >= 0]) == newest


def test_tables_in_one_row(runner, queue, rng):
    indptr = np.array([0, 3, 3, 5], "i4")
    indices = np.array([9, 2, 4, 7, 0, 8], "i4")
    batch = np.array([0, 0, 1, 2, 2, -1, 3], "i4")
    positions = np.array([0, 11, 0, 7, 8, 0, 0])
    wanted = check(queue, indices, positions, 4, batch_indices=batch, kv_indptr=indptr)
    assert wanted.tolist() == [36, 19, -1, 3, -1, -1, -1]


@pytest.mark.parametrize("index", INDEX)
def test_batch_indices_and_positions(runner, queue, index):
    starts, lens = np.array([0, 2, 2, 5], index), np.array([9, 0, 3], index)
    found = kv.get_batch_indices_positions(to_device(starts, queue), to_device(lens, queue), 7)
    wanted = reference.get_batch_indices_positions(starts, lens, 7)
    for own, other in zip(found, wanted):
        host = arrays.to_numpy(own)
        assert host.dtype == index
        np.testing.assert_array_equal(host, other)
    assert wanted[1].tolist() == [7, 8, 0, 1, 2, -1, -1]


@pytest.mark.parametrize("kind", ["NHD", "HND", "one array"])
def test_append(queue, rng, kind):
    lens, starts = np.array([6, 9], "i4"), np.array([0, 2, 5], "i4")
    indptr, indices = np.array([0, 2, 5], "i4"), np.array([5, 1, 0, 3, 2], "i4")
    rows = random_bits(rng, (2, 6, 3, 8), "f4")
    both = sentinel((6, 2, 3, 4, 8) if kind == "HND" else (6, 2, 4, 3, 8), "f4")
    twins = Twins(queue)
    places = kv.get_batch_indices_positions(twins.view(starts), twins.view(lens), 6)
    given = twins.view(both) if kind == "one array" else (twins.view(both[:, 0]), twins.view(both[:, 1]))
    layout = {"kv_layout": "HND"} if kind == "HND" else {}
    key, value, *table = (twins.view(each) for each in (*rows, indices, indptr))
    kv.append_paged_kv_cache(key, value, *places, given, *table, **layout)
    oracle = reference.get_batch_indices_positions(starts, lens, 6)
    caches = [each.swapaxes(1, 2) if kind == "HND" else each for each in (both[:, 0], both[:, 1])]
    reference.append_paged_kv_cache(*rows, *oracle, caches, indices, indptr)
    twins.assert_equal()


def test_what_is_refused(queue):
    table, positions = (to_device(np.zeros(shape, "i4"), queue) for shape in ((2, 3), (4,)))
    starts, wide = (to_device(np.zeros(3, kind), queue) for kind in ("i4", "i8"))
    four = to_device(np.zeros(4, "i4"), queue)
    for options, error, message in (
        ({"query_start_loc": wide}, TypeError, "`query_start_loc` must be int32, got int64"),
        ({"query_start_loc": four}, ValueError, r"`query_start_loc` must have shape \[num_seqs \+ 1\]"),
        ({"batch_indices": four, "query_start_loc": starts}, ValueError, "pass one of them, got both"),
        ({"kv_indptr": starts}, ValueError, r"`block_table` must have shape \[num_indices\], got \[2, 3\]"),
        ({"window": 0}, ValueError, "`window` must be >= 1, got 0"),
        ({"num_sinks": -1}, ValueError, "`num_sinks` must be >= 0, got -1"),
    ):
        with pytest.raises(error, match=message):
            kv.slot_mapping(table, positions, 16, **options)
    with pytest.raises(ValueError, match="`block_size` must be >= 1, got 0"):
        kv.slot_mapping(table, positions, 0)
    with pytest.raises(ValueError, match=r"must hold fewer than 2\*\*32 tokens"):
        kv.slot_mapping(table, positions, 2**31)
    with pytest.raises(ValueError, match="`kv_layout` must be 'NHD' or 'HND', got 'HDN'"):
        kv.append_paged_kv_cache(None, None, None, None, None, None, None, kv_layout="HDN")
    with pytest.raises(ValueError, match=r"`paged_kv_cache` must be a pair of arrays or"):
        kv.append_paged_kv_cache(None, None, None, None, table, None, None)
