"""reshape_and_cache against the reference: dtypes, slots, sizes; whole caches over a sentinel fill."""

import numpy as np
import pytest

from helpers import check_write, contiguous_case, random_bits, sentinel, to_bytes, to_device
from kvcache_dpex import empty_cache, reshape_and_cache
from kvcache_dpex.ops import groups
from kvcache_dpex.ops.operation import using
from kvcache_dpex.runtime.launch import arrays

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32"]
DTYPES += ["int64", "uint64", "float64", "complex64"]
SLOTS = [7, -1, 0, 19, 8]


def slots_of(values, dtype="int64"):
    return np.array(values, dtype)


@pytest.fixture
def rng():
    return np.random.default_rng(20)


def skip_without_float64(queue, dtype):
    if dtype == "float64" and not queue.sycl_device.has_aspect_fp64:
        pytest.skip(f"{queue.sycl_device.name} has no float64 arrays")


@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_bit_for_bit(whole_rows, queue, rng, dtype, slot_dtype):
    """Random bits, NaN payloads included; uint16 stands for bfloat16 bits. numba #4402: float16 too."""
    skip_without_float64(queue, dtype)
    check_write(queue, *contiguous_case(rng, dtype, size=16), slots_of(SLOTS, slot_dtype))


@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_in_odd_rows(runner, queue, rng, dtype, slot_dtype):
    skip_without_float64(queue, dtype)
    check_write(queue, *contiguous_case(rng, dtype, size=3), slots_of(SLOTS, slot_dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("heads", [1, 13])
@pytest.mark.parametrize("size", [1, 3, 46, 80, 96, 112, 120, 192, 576])
def test_every_head_size(queue, rng, size, heads, dtype):
    """vllm #41257: rows that are no multiple of a vector; every slot of a 3-block cache is written."""
    case = contiguous_case(rng, dtype, blocks=3, block_size=2, heads=heads, size=size)
    check_write(queue, *case, slots_of(rng.permutation(6)))


@pytest.mark.parametrize(("size", "value_size"), [(16, 8), (8, 16), (192, 128), (3, 46), (576, 1)])
@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8"])
def test_value_has_a_head_size_of_its_own(runner, queue, rng, dtype, size, value_size):
    if runner == "plain" and size > 16:
        size, value_size = size // 4, value_size // 4 or 1
    check_write(queue, *contiguous_case(rng, dtype, size=size, value_size=value_size), slots_of(SLOTS))


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("size", [8, 5])
def test_every_block_size(whole_rows, queue, rng, block_size, size):
    case = contiguous_case(rng, "float32", blocks=3, block_size=block_size, size=size, tokens=3)
    check_write(queue, *case, slots_of([3 * block_size - 1, block_size, block_size - 1]))


def test_three_different_sizes_stay_in_their_order(runner, queue, rng):
    """numba-dpex #889: tokens, heads and head size all differ, so exchanged axes would show."""
    case = contiguous_case(rng, "float32", blocks=2, block_size=3, heads=5, size=7, tokens=3)
    check_write(queue, *case, slots_of([4, 0, 3]))


@pytest.mark.parametrize("size", [4, 3])
def test_padding_skips_and_does_not_wrap(whole_rows, queue, rng, size):
    """vllm #43810: -1 must not become the last slot of the cache."""
    case = contiguous_case(rng, "float32", blocks=4, block_size=4, size=size, tokens=3)
    check_write(queue, *case, slots_of([3, -1, 0]))


@pytest.mark.parametrize("size", [4, 3])
@pytest.mark.parametrize(
    ("slot", "dtype"),
    [
        (-1, "int32"),
        (-20, "int32"),
        (-(2**31), "int32"),
        (20, "int32"),
        (2**31 - 1, "int32"),
        (-(2**63), "int64"),
        (-(2**32) + 3, "int64"),
        (20, "int64"),
        (2**31, "int64"),
        (2**32 + 3, "int64"),
        (2**63 - 1, "int64"),
    ],
)
def test_slots_outside_of_the_cache_are_never_written(whole_rows, queue, rng, slot, dtype, size):
    """vllm #43810: every negative skips, as does every slot from 5 * 4 on; their neighbours are written."""
    check_write(queue, *contiguous_case(rng, "float32", size=size), slots_of([2, slot, 3], dtype))


@pytest.mark.parametrize("size", [4, 3])
@pytest.mark.parametrize("given", [0, 1, 5])
def test_surplus_rows_are_ignored(whole_rows, queue, rng, given, size):
    """vllm #13922: fewer slots than rows, as when rows are padded for a replay."""
    case = contiguous_case(rng, "float32", tokens=8, size=size)
    check_write(queue, *case, slots_of([9, 3, 17, 0, 4][:given]))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("step", [slice(None, None, 2), slice(None, None, -1), slice(5, None, -3)])
@pytest.mark.parametrize("size", [4, 3])
def test_slots_of_any_stride(whole_rows, queue, rng, size, step, dtype):
    slots = slots_of([3, 1, 19, 5, 0, 12], dtype)[step]
    check_write(queue, *contiguous_case(rng, "float32", size=size), slots)


@pytest.mark.parametrize("tokens", [1, 7, 8193])
@pytest.mark.parametrize(("size", "dtype"), [(576, "uint16"), (1025, "int8")])
def test_group_limits(queue, rng, monkeypatch, tokens, size, dtype):
    """numba-dpex #1308: sizes around the work-group limit, with a limit of 64 and with the device's own."""
    for limit in (64, queue.sycl_device.max_work_group_size):
        monkeypatch.setattr(groups, "group_limit", lambda device, limit=limit: limit)
        case = contiguous_case(rng, dtype, blocks=2, block_size=8, heads=1, size=size, tokens=tokens)
        slots = np.full(tokens, -1)
        slots[[0, -1]] = 11, 3
        with using():
            check_write(queue, *case, slots)


@pytest.mark.parametrize(
    ("blocks", "tokens", "slots"),
    [(5, 0, []), (0, 0, []), (0, 3, [0, 1, -1]), (5, 3, []), (5, 3, [-1, -2, -3]), (5, 3, [20, 21, 22])],
)
@pytest.mark.parametrize("size", [4, 3])
def test_nothing_to_do(runner, queue, rng, blocks, tokens, slots, size):
    """intel/llvm #1708: no tokens, no blocks, no slot inside."""
    case = contiguous_case(rng, "float32", blocks=blocks, tokens=tokens, size=size)
    check_write(queue, *case, slots_of(slots))


@pytest.mark.parametrize("size", [4, 3])
def test_duplicates_leave_their_rows_elements(whole_rows, queue, rng, size):
    """Whose row wins is open, element by element on a parallel device; no other slot changes."""
    key, value, key_cache, value_cache = contiguous_case(rng, "int32", tokens=64, size=size)
    device = [to_device(cache, queue) for cache in (key_cache, value_cache)]
    slots = to_device(slots_of([6] * 64), queue)
    reshape_and_cache(to_device(key, queue), to_device(value, queue), *device, slots)
    for rows, cache, found in ((key, key_cache, device[0]), (value, value_cache, device[1])):
        found = arrays.to_numpy(found)
        written = found.reshape(20, 2, size)[6]
        assert (written == rows).any(axis=0).all()
        cache.reshape(20, 2, size)[6] = written
        np.testing.assert_array_equal(found, cache)


@pytest.mark.parametrize("name", ["float32", "float16", "uint16", "int8", "complex64"])
def test_dpnp_arrays(queue, rng, name):
    """dpnp #1649: dpnp's own strides are in elements in old releases and in bytes in new ones."""
    import dpnp

    try:
        dpnp.empty(1, dtype=name)
    except (TypeError, ValueError):
        pytest.skip(f"dpnp {dpnp.__version__} has no {name}; usm_ndarray has, and is tested above")
    base = sentinel((5, 2, 4, 2, 8), name)
    key, value, _, _ = contiguous_case(rng, name)
    check_write(queue, key, value, base[:, 0], base[:, 1], slots_of(SLOTS), wrap=arrays.as_dpnp)


def test_a_nan_that_was_there_stays_in_its_slot(queue, rng):
    """vllm #641: a pool full of NaN keeps it in unwritten slots only; a fresh cache has none."""
    key, value, key_cache, value_cache = contiguous_case(rng, "float32", blocks=4, tokens=13)
    key[...] = value[...] = 1.0
    key_cache[...] = value_cache[...] = np.nan
    check_write(queue, key, value, key_cache, value_cache, np.arange(13))
    assert np.isnan(key_cache).sum() == np.isnan(value_cache).sum() == 3 * 2 * 8
    for cache in empty_cache(4, 4, 2, 8, device=queue):
        assert not to_bytes(cache).any()


@pytest.mark.parametrize("packed", [False, True], ids=["strided", "whole rows"])
def test_elements_beyond_2_to_the_31(whole_rows, queue, rng, packed):
    """Bytes 2**31 and up of an int8 cache, addressed by int32 slots; only slices are read back.

    vllm #1486.
    """
    tensor = arrays.tensor_module()
    heads, size = 32, 128
    if packed:  # keys and values in turns, so that the slot stride is twice the row
        both = tensor.empty((16385, 16, 2, heads, size), dtype="int8", sycl_queue=queue)
        key_cache, value_cache, slot = both[:, :, 0], both[:, :, 1], 2**18
        value_size = size
    else:
        key_cache = tensor.empty((32769, 16, heads, size), dtype="int8", sycl_queue=queue)
        value_cache = tensor.empty((32769, 16, heads, 1), dtype="int8", sycl_queue=queue)
        slot, value_size = 2**19, 1
    near = [0, slot - 2, slot - 1, slot, slot + 1]
    for cache in (key_cache, value_cache):
        for place in near:
            cache[place // 16, place % 16] = 77
    rows = [random_bits(rng, (2, heads, width), "int8") for width in (size, value_size)]
    slots = slots_of([slot - 1, slot], "int32")
    reshape_and_cache(
        *(to_device(row, queue) for row in rows), key_cache, value_cache, to_device(slots, queue)
    )
    for row, cache in zip(rows, (key_cache, value_cache)):
        for place in near:
            found = arrays.to_numpy(tensor.copy(cache[place // 16, place % 16]))
            wanted = row[place - slot + 1] if place in slots else np.full_like(row[0], 77)
            np.testing.assert_array_equal(found, wanted)
