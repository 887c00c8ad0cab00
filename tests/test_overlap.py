"""Arrays that share memory: what is read and what is written, and what is written twice."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcache_dpex as kv
from helpers import Twins, check_write, contiguous_case, random_bits, sentinel
from kvcache_dpex.layout import Span, are_disjoint, extent
from kvcache_dpex.ops.overlap import Guard
from kvcache_dpex.runtime.launch.arrays import Operand
from quantizing import check_quantize

CASES = 500


def places(span, start=0):
    """Every byte of an array."""
    found = set()
    for index in np.ndindex(*span.shape):
        at = start + sum(step * stride for step, stride in zip(index, span.strides)) * span.itemsize
        found |= set(range(at, at + span.itemsize))
    return found


axes = st.lists(st.tuples(st.integers(1, 4), st.integers(-12, 12)), min_size=1, max_size=3)
spans = st.builds(
    lambda sizes, itemsize: Span(tuple(n for n, _ in sizes), tuple(step for _, step in sizes), itemsize),
    axes,
    st.sampled_from([1, 2, 4]),
)


@settings(max_examples=CASES)
@given(first=spans, second=spans, distance=st.integers(-60, 60))
def test_what_is_called_disjoint_shares_no_byte(first, second, distance):
    if are_disjoint(first, second, distance):
        assert not places(first) & places(second, distance)


@settings(max_examples=CASES)
@given(span=spans)
def test_extent_is_that_of_the_bytes(span):
    assert extent(*span) == (min(places(span)), max(places(span)) + 1)


def test_layouts_that_are_proven_to_be_disjoint():
    """Packed rows, interleaved blocks, inline scales and layers of one buffer, forwards and backwards."""
    packed = Span((5, 4, 2, 8), (128, 32, 16, 1), 2)
    blocks = Span((5, 4, 2, 8), (128, 16, 8, 1), 2)
    codes, scales = Span((5, 4, 2, 8), (192, 48, 24, 1), 1), Span((5, 4, 2), (48, 12, 6), 4)
    for first, second, apart, meeting in (
        (packed, packed, 16, 14),
        (blocks, blocks, 128, 126),
        (codes, scales, 8, 7),
        (codes, codes, 12, 7),
        (scales, scales, 12, 3),
    ):
        assert are_disjoint(first, second, apart)
        assert are_disjoint(second, first, -apart)
        assert not are_disjoint(first, second, meeting)
    reversed_blocks = blocks._replace(strides=(-128, 16, 8, 1))
    assert are_disjoint(reversed_blocks, blocks, 128 - 4 * 256)


@pytest.mark.parametrize("name", [name for name in kv.__all__ if hasattr(getattr(kv, name), "operation")])
def test_every_written_array_is_compared_with_every_other_array(name):
    """At one address, whichever two they are; arrays that are only read may meet, and blocks that move."""
    operation = getattr(kv, name).operation
    names = [array.name for array in operation.arrays]
    kinds = [array.kind for array in operation.arrays]
    operand = Operand((4,), (1,), np.dtype("f4"), None)
    guard = Guard(names, kinds, [operand] * len(names), operation.may_overlap)
    guard.require_disjoint([100 * at for at in range(len(names))])
    for first, second in combinations(range(len(names)), 2):
        addresses = [100 * (first if at == second else at) for at in range(len(names))]
        allowed = {names[first], names[second]} in map(set, operation.may_overlap)
        both = kinds[first] == kinds[second] == "written"
        if both or ("written" in (kinds[first], kinds[second]) and not allowed):
            with pytest.raises(ValueError, match=rf"`({names[first]}|{names[second]})`.* must not .*`"):
                guard.require_disjoint(addresses)
        else:
            guard.require_disjoint(addresses)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def refused(queue, host, message):
    twins = Twins(queue)
    with pytest.raises(ValueError, match=message):
        kv.reshape_and_cache(*(twins.view(array) for array in host))
    twins.assert_equal()


@pytest.mark.parametrize("size", [8, 3], ids=["whole words", "odd"])
def test_rows_that_are_slots_of_the_cache_are_refused(queue, rng, size):
    """llama.cpp #12253: rows moved inside of one buffer; the order of reads and writes is nobody's."""
    _, value, key_cache, value_cache = contiguous_case(rng, "float32", size=size)
    rows = key_cache.reshape(-1, 2, size)[4:10]
    refused(
        queue, (rows, value, key_cache, value_cache, np.arange(6)), "`key_cache` .*share memory with `key`"
    )
    refused(queue, (value, rows, key_cache, value_cache, np.arange(6)), "`key_cache` .*memory with `value`")


def test_slots_in_the_memory_of_the_cache_are_refused(queue, rng):
    key, value, _, _ = contiguous_case(rng, "int64")
    base = np.zeros((2, 5, 4, 2, 8), "int64")
    slots = base[0].reshape(-1)[:6]
    refused(queue, (key, value, base[0], base[1], slots), "`key_cache` .*share memory with `slot_mapping`")


def test_caches_that_overlap_on_purpose_are_written(queue, rng):
    """transformers' paged cache: K and V are views of one buffer whose slots do not meet."""
    key, value, _, _ = contiguous_case(rng, "float32")
    base = sentinel((8, 4, 2, 8), "float32")
    check_write(queue, key, value, base[:6], base[2:], np.array([0, 3, -1, 4, 1, 7]))


def test_rows_beside_the_slots_that_are_written_are_read(queue, rng):
    """New rows lie between the slots of one buffer, apart in every period."""
    base = random_bits(rng, (24, 3, 2, 8), "float32")
    caches = base[:20, 0].reshape(20, 1, 2, 8), base[:20, 1].reshape(20, 1, 2, 8)
    assert all(np.shares_memory(cache, base) for cache in caches)
    check_write(queue, base[:6, 2], base[6:12, 2], *caches, np.array([7, -1, 19, 0, 20, 3]))


def quant_arrays(rng, base):
    rows = rng.standard_normal((2, 6, 2, 8)).astype("f4")
    return [
        *rows,
        base[..., :8],
        base[..., 12:20],
        base[..., 8:12].view("f4")[..., 0],
        base[..., 20:24].view("f4")[..., 0],
    ]


def test_inline_scales_are_written_beside_their_codes(queue, rng):
    """vLLM's rows of codes and scale, keys and values: disjoint by strides only."""
    base = sentinel((5, 4, 2, 24), "int8")
    check_quantize(queue, *quant_arrays(rng, base), np.array([7, -1, 19, 0, 20, 3]))


@pytest.mark.parametrize(("name", "at"), [("ks", slice(7, 11)), ("vs", slice(4, 8))])
def test_scales_inside_of_codes_are_refused(queue, rng, name, at):
    base = sentinel((5, 4, 2, 24), "int8")
    host = quant_arrays(rng, base)
    inside = np.ndarray((5, 4, 2), "f4", base, at.start + (-at.start) % 4, (192, 48, 24))
    host[4 if name == "ks" else 5] = inside
    if at.start % 4:
        host[2] = base[..., 4:12]
    twins = Twins(queue)
    device = [twins.view(array) for array in (*host, np.arange(6))]
    with pytest.raises(ValueError, match=rf"must not share memory with `({name}|kq|vq)`"):
        kv.reshape_and_cache_quant(*device)
    twins.assert_equal()


def test_decoding_into_its_own_codes_or_scales_is_refused(queue):
    base = np.zeros((2, 4, 2, 4), "f4")
    for q, scales in (
        (base.view("int8")[..., :4], np.ones((8, 2), "f4")),
        (np.zeros((2, 4, 2, 4), "int8"), base.reshape(-1)[:16].reshape(8, 2)),
    ):
        twins = Twins(queue)
        with pytest.raises(
            ValueError, match=r"`out` is written, so it must not share memory with `(q|scales)`"
        ):
            kv.dequant_cache(twins.view(q), twins.view(scales), out=twins.view(base))
        twins.assert_equal()
