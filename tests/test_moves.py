"""copy_blocks, swap_blocks, zero_blocks, gather_blocks and move_blocks against the oracle, whole memories."""

import numpy as np
import pytest

import kvcache_dpex as kv
from helpers import Twins, random_bits, sentinel, to_bytes, to_device
from kvcache_dpex import reference
from kvcache_dpex.ops import calls
from kvcache_dpex.ops.operation import using
from kvcache_dpex.ops.pools import steps_of

PAIRS = {
    "apart": [(0, 3), (1, 4)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "exchange through a third": [(0, 5), (1, 0), (5, 1)],
    "one source twice": [(0, 1), (0, 2)],
    "one target twice": [(0, 2), (1, 2)],
    "read, then written": [(0, 1), (2, 0)],
    "onto itself": [(3, 3), (0, 1)],
    "none": [],
}


@pytest.fixture
def rng():
    return np.random.default_rng(15)


def pool(rng, layout, dtype, blocks=6):
    """Arrays of a pool: two caches and their scales."""
    sizes = {"wide": (64, 64), "odd": (5, 3)}.get(layout, (16, 16))
    scales = [random_bits(rng, (blocks * 4, 3), "f4") for _ in sizes]
    if layout == "packed":
        both = random_bits(rng, (blocks, 4, 3, sum(sizes)), dtype)
        return [both[..., : sizes[0]], both[..., sizes[0] :], *scales]
    if layout == "interleaved":
        both = random_bits(rng, (blocks, 2, 4, 3, sizes[0]), dtype)
        return [both[:, 0], both[:, 1], *scales]
    if layout == "HND":
        return [random_bits(rng, (blocks, 3, 4, size), dtype).swapaxes(1, 2) for size in sizes] + scales
    if layout == "sliced":
        return [random_bits(rng, (blocks + 1, 5, 4, 19), dtype)[1:, ::-1, 1:][:, :4, :, :16] for _ in sizes]
    return [random_bits(rng, (blocks, 4, 3, size), dtype) for size in sizes] + scales


LAYOUTS = ["wide", "odd", "packed", "interleaved", "HND", "sliced"]


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_copies_happen_one_after_the_other(queue, rng, pairs):
    host, twins = pool(rng, "wide", "i1"), Twins(queue)
    device = [twins.view(array) for array in host]
    kv.copy_blocks([device[:2], device[2:]], pairs)
    reference.copy_blocks(host, pairs)
    twins.assert_equal()


@pytest.mark.parametrize("dtype", ["u1", "u2", "f4", "f8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_types(runner, queue, rng, layout, dtype):
    if layout == "sliced" and dtype not in ("u1", "f4"):
        pytest.skip("covered by the others")
    host, twins = pool(rng, layout, dtype), Twins(queue)
    device = [twins.view(array) for array in host]
    kv.copy_blocks(device, [(5, 0), (0, 2)])
    reference.copy_blocks(host, [(5, 0), (0, 2)])
    kv.zero_blocks(device, [1, 4, 1])
    reference.zero_blocks(host, [1, 4])
    twins.assert_equal()


@pytest.mark.parametrize("usm_type", ["device", "host", "shared"])
def test_swap_between_pools(queue, rng, usm_type):
    """Of different size, layout and kind of memory, out and in again."""
    source, target = pool(rng, "HND", "f2"), pool(rng, "interleaved", "f2", blocks=2)
    target = [np.ascontiguousarray(each) for each in target]
    twins = Twins(queue)
    here = [twins.view(array) for array in source]
    there = [to_device(array, queue, usm_type) for array in target]
    kv.swap_blocks(here, there, [(5, 0), (1, 1), (3, 0)])
    reference.swap_blocks(source, target, [(5, 0), (1, 1), (3, 0)])
    kv.swap_blocks(there, here, [(0, 4)])
    reference.swap_blocks(target, source, [(0, 4)])
    twins.assert_equal()
    for own, other in zip(there, target):
        np.testing.assert_array_equal(to_bytes(own), to_bytes(other))


@pytest.mark.parametrize("pairs", [np.array([[0, 1], [4, 2]]), np.array([[0, 1], [4, 2]], "u1"), "device"])
def test_pairs_as_arrays(queue, rng, pairs):
    host, twins = pool(rng, "wide", "u1"), Twins(queue)
    if isinstance(pairs, str):
        pairs = to_device(np.array([[0, 1], [4, 2]], "i4"), queue)
    kv.copy_blocks([twins.view(array) for array in host], pairs)
    reference.copy_blocks(host, [(0, 1), (4, 2)])
    twins.assert_equal()


@pytest.mark.parametrize("dtype", ["i4", "i8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather(queue, rng, layout, dtype):
    cache = pool(rng, layout, "u2")[0]
    table = np.array([[5, -1, 0], [2**30, 6, 5]], dtype)
    twins = Twins(queue)
    found = kv.gather_blocks(twins.view(cache), twins.view(table))
    wanted = reference.gather_blocks(cache, table)
    np.testing.assert_array_equal(to_bytes(found), to_bytes(wanted))
    out = sentinel((2, 3, *cache.shape[1:-1], 2 * cache.shape[-1]), "u2")[..., ::2]
    assert kv.gather_blocks(twins.view(cache), twins.view(table), out=(own := twins.view(out))) is own
    out[...] = wanted
    twins.assert_equal()


def test_moves_of_ids_on_the_device(queue, rng):
    """A pair outside is skipped, or gives zeros; without target ids the blocks are 0, 1 and so on."""
    host = pool(rng, "odd", "u1")
    into = [sentinel((3, *array.shape[1:]), "u1") for array in host[:2]]
    into[1] = sentinel((3, 4, 3, 5), "u1")
    limits = np.iinfo("i4")
    ids = np.array([5, -1, 6, limits.max, 2], "i4"), np.array([2, 0, -1, 1, limits.max], "i4")
    for targets in (ids[1], None):
        twins = Twins(queue)
        view = twins.view
        sources = {"source_0": host[0], "source_1": host[0].copy()}
        given = {"source_ids": ids[0], "target_0": into[0], "target_1": into[1], **sources}
        given["target_0"] = sentinel((3, 4, 3, 5), "u1")
        if targets is not None:
            given["target_ids"] = targets
        kv.move_blocks(**{name: view(array) for name, array in given.items()})
        reference.move_blocks(**given)
        twins.assert_equal()


def test_launches_are_shared(queue, rng):
    """32 layers are 8 launches, for keys and values have blocks of one shape."""
    layers = [kv.empty_cache(4, 2, 1, 8, device=queue) for _ in range(32)]
    launched = []

    def launch(plan):
        run = calls.launch_of(plan)
        return lambda pointers, owners: (launched.append(plan), run(pointers, owners))

    with using(launch=launch):
        kv.copy_blocks(layers, [(0, 2), (1, 3)])
        assert len(launched) == 8
        kv.copy_blocks(layers, [(0, 2), (2, 3)])
        assert len(launched) == 8 + 16


@pytest.mark.parametrize("size", [16, 3])
def test_every_array_of_a_launch(runner, queue, rng, size):
    """More arrays than one launch takes, each with bits of its own."""
    host, twins = [random_bits(rng, (4, 2, 1, size), "u2") for _ in range(9)], Twins(queue)
    kv.copy_blocks([twins.view(array) for array in host], [(0, 2), (1, 3)])
    reference.copy_blocks(host, [(0, 2), (1, 3)])
    twins.assert_equal()


def test_steps_end_where_a_copy_depends_on_an_earlier_one():
    assert list(steps_of([(0, 1), (0, 2), (3, 4)])) == [([0, 0, 3], [1, 2, 4])]
    assert list(steps_of([(0, 1), (2, 0)])) == [([0], [1]), ([2], [0])]
    assert list(steps_of([(0, 1), (2, 1)])) == [([0], [1]), ([2], [1])]


def caches(queue):
    return kv.empty_quant_cache(6, 4, 3, 16, device=queue)


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([(0, 6)], IndexError, r"`pairs\[0\]` must name one of the 6 blocks of `caches`, got 6"),
        ([(0, 1), (-1, 2)], IndexError, r"`pairs\[1\]` must name one of the 6 blocks of `caches`, got -1"),
        ([(0, 1, 2)], ValueError, r"`pairs` must have shape \[num_pairs, 2\], got \[1, 3\]"),
        ([0, 1], ValueError, r"`pairs` must have shape \[num_pairs, 2\], got \[2\]"),
        ([(0.0, 1.0)], TypeError, "`pairs` must hold integers, got float64"),
        ([(2**70, 0)], TypeError, "`pairs` must hold integers, got object"),
    ],
)
def test_pairs_that_are_refused(queue, pairs, error, message):
    pool = caches(queue)
    pool[0][0] = 1
    with pytest.raises(error, match=message):
        kv.copy_blocks(pool, pairs)
    assert int(pool[0].sum()) == 4 * 3 * 16


def test_ids_that_are_refused(queue):
    with pytest.raises(
        IndexError, match=r"`block_ids\[1\]` must name one of the 6 blocks of `caches`, got 6"
    ):
        kv.zero_blocks(caches(queue), [0, 6])
    with pytest.raises(ValueError, match=r"`block_ids` must have shape \[num_ids\], got \[1, 2\]"):
        kv.zero_blocks(caches(queue), [[0, 1]])


def test_pools_that_are_refused(queue):
    kq, vq, ks, vs = caches(queue)
    for pool, message in (
        ([], "`caches` must hold at least one array"),
        ([ks, vs], r"`caches\[0\]` must have shape \[num_blocks, block_size, \.\.\.\]"),
        ([kq, vq[:5], ks], r"`caches\[1\]` must have the 6 blocks of `caches\[0\]`, got 5"),
        ([(kq, vq, ks[:5])], r"`caches\[0\]\[2\]` must have a first axis of num_blocks or"),
        ([kq, vq, kq], r"`caches\[0\]` is written, so it must not share memory with `caches\[2\]`"),
    ):
        with pytest.raises(ValueError, match=message):
            kv.copy_blocks(pool, [(0, 1)])
    wide = to_device(np.zeros((6, 4, 1), "c8"), queue)
    kv.copy_blocks([wide], [(0, 1)])
    with pytest.raises(TypeError, match=r"`caches\[1\]` must be a dpnp array"):
        kv.copy_blocks([kq, np.zeros(3)], [(0, 1)])


@pytest.mark.parametrize("number", [0, -1, 5, 48])
@pytest.mark.parametrize("name", ["num_sources", "num_targets"])
def test_numbers_of_blocks_that_do_not_divide_an_array(queue, name, number):
    source, target = to_device(np.ones((24, 3), "f4"), queue), to_device(np.zeros((24, 3), "f4"), queue)
    ids = to_device(np.zeros(1, "i4"), queue)
    numbers = {"num_sources": 6, "num_targets": 6, name: number}
    with pytest.raises(
        ValueError, match=rf"`{name[4:-1]}_0` must have a first axis .* num_blocks = {number}, "
    ):
        kv.move_blocks(ids, target, ids, source_0=source, **numbers)
    assert not to_bytes(target).any()


def test_swaps_that_are_refused(queue):
    kq, vq, ks, vs = caches(queue)
    other = kv.empty_quant_cache(2, 4, 3, 16, device=queue)
    with pytest.raises(ValueError, match=r"`targets` must hold an array for each of the 4 of .*, got 3"):
        kv.swap_blocks([kq, vq, ks, vs], other[:3], [(0, 1)])
    with pytest.raises(TypeError, match=r"`targets\[1\]` must have the dtype of .*, float32, got int8"):
        kv.swap_blocks([kq, ks], other[:2], [(0, 1)])
    with pytest.raises(ValueError, match=r"`targets\[0\]` must have the blocks of `sources\[0\]`"):
        kv.swap_blocks([kq[:, :2]], other[:1], [(0, 1)])
    with pytest.raises(IndexError, match=r"`pairs\[0\]` must name one of the 2 blocks of `targets`, got 2"):
        kv.swap_blocks([kq], other[:1], [(0, 2)])
    with pytest.raises(ValueError, match=r"`targets\[0\]` is written, so it must not share"):
        kv.swap_blocks([kq], [kq[1:]], [(0, 2)])


def test_results_of_gather_that_are_refused(queue):
    kq, _, _, _ = caches(queue)
    table = to_device(np.array([[0, 1]]), queue)
    with pytest.raises(ValueError, match=r"`out` must be int8 of shape \[1, 2, 4, 3, 16\], got int8 of \[2,"):
        kv.gather_blocks(kq, table, out=kq[:2].copy())
    with pytest.raises(TypeError, match="`source_ids` must be int32 or int64, got float32"):
        kv.gather_blocks(
            kq, table.astype("f4") if hasattr(table, "astype") else to_device(np.zeros(2, "f4"), queue)
        )
