"""paged_attention against the oracle: every type, layout and option, mixed batches, whole results."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attending import as_cache, batch, check_attention
from helpers import to_device
from kvcache_dpex import paged_attention, reference
from kvcache_dpex.layout import contiguous_strides
from kvcache_dpex.ops import attention_plans
from kvcache_dpex.ops.attention_plans import splits_of
from kvcache_dpex.ops.calls import Steps
from kvcache_dpex.ops.operation import using
from kvcache_dpex.runtime.launch import arrays, scratch
from kvcache_dpex.runtime.launch.arrays import Operand

VALUES = ["float32", "float16", "bfloat16"]
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 3},
    "soft cap": {"soft_cap": 0.5},
    "sinks": {"sinks": np.array([0.5, -np.inf, 3, -200], "f4")},
    "all": {"sliding_window": 4, "soft_cap": 20.0, "sinks": np.array([0, 1, 2, 3], "f4"), "scale": 0.4},
}
BATCHES = {
    "decode": ([5, 1, 16, 17, 0], None),
    "prefill": ([9, 3], [9, 3]),
    "mixed": ([9, 7, 0, 12, 3], [1, 7, 0, 5, 0]),
}


@pytest.fixture
def rng():
    return np.random.default_rng(31)


@pytest.fixture(params=["paged_attention_cpu", "paged_attention_strided"])
def kernel(request, queue):
    """Attention by one kernel, where it takes the case."""
    if "runner" in request.fixturenames:
        request.getfixturevalue("runner")
    if request.param == "paged_attention_cpu" and not queue.sycl_device.is_cpu:
        pytest.skip("the kernel is for CPU devices")
    with using(variant=request.param):
        yield request.param


def test_scratch_memory_is_used_again_and_released(queue):
    """First, since kernels that get too little of it may end the process."""
    import dpctl

    own = dpctl.SyclQueue(queue.sycl_device)
    memory = scratch.of_queue(own)
    assert scratch.of_queue(own) is memory
    with memory.lent(1000) as first, memory.lent(10) as second:
        assert first is not second
    with memory.lent(500) as again:
        assert again is first or again.size >= 500
    with memory.lent(2000) as larger:
        assert larger.size >= 2000
    pieces = [memory.lent(10) for _ in range(9)]
    for piece in pieces:
        piece.__enter__()
    for piece in pieces:
        piece.__exit__(None, None, None)
    assert len(memory._spare) == scratch.Scratch.MOST
    del memory
    assert own not in scratch._of_queues


@pytest.mark.parametrize("code", [None, "int8", "fp8"])
@pytest.mark.parametrize("value", VALUES)
def test_every_type(runner, kernel, queue, rng, value, code):
    """With the NaN of unused slots beside what is read: vLLM #641, flash-attention #1745."""
    arguments, starts = batch(rng, [9, 0, 3], [2, 0, 1], q_heads=2, kv_heads=1)
    arguments, scales = as_cache(arguments, code or value)
    check_attention(queue, arguments, {**starts, **scales}, value=value, gap=2)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", BATCHES)
def test_every_option(kernel, queue, rng, case, options):
    arguments, starts = batch(rng, *BATCHES[case])
    for with_lse in (True, False):
        check_attention(queue, arguments, {**starts, **OPTIONS[options]}, with_lse=with_lse)


@pytest.mark.parametrize("runner", ["plain", "packaged"], indirect=True)
def test_all_options_in_every_runner(runner, kernel, queue, rng):
    arguments, starts = batch(rng, [9, 2], [2, 1], value_head_size=32)
    check_attention(queue, arguments, {**starts, **OPTIONS["all"]})


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (32, 8)])
@pytest.mark.parametrize("size", [1, 3, 16, 64, 80, 128, 256, (576, 512), (8, 300)])
def test_every_head_size(kernel, queue, rng, size, heads):
    size, value_size = size if isinstance(size, tuple) else (size, size)
    arguments, _ = batch(
        rng, [19, 3], head_size=size, value_head_size=value_size, q_heads=heads[0], kv_heads=heads[1]
    )
    check_attention(queue, arguments, {})


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_every_block_size(kernel, queue, rng, block_size):
    arguments, _ = batch(rng, [block_size, block_size + 1, 2 * block_size, 40], block_size=block_size)
    check_attention(queue, arguments, {})


def hnd(cache):
    return np.ascontiguousarray(cache.swapaxes(1, 2)).swapaxes(1, 2)


def beside(cache, at, count, filling):
    """One of `count` neighbours along a new axis, the others filled."""
    memory = np.full((*cache.shape[:at], count, *cache.shape[at:]), filling, cache.dtype)
    view = memory[(slice(None),) * at + (1,)]
    view[...] = cache
    return view


LAYOUTS = {
    "HND": hnd,
    "keys and values in one block": lambda cache: beside(cache, 1, 2, np.nan),
    "keys and values in one row": lambda cache: beside(cache, 3, 2, np.nan),
    "elements apart": lambda cache: beside(cache, 4, 3, np.nan),
    "reversed": lambda cache: np.ascontiguousarray(cache[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(kernel, queue, rng, layout):
    """vLLM #8200: strides say where a row is. The query, too, may be a slice."""
    arguments, starts = batch(rng, [9, 5], [2, 5], head_size=16)
    arguments[0] = beside(arguments[0], 1, 3, np.nan)
    arguments[1:3] = map(LAYOUTS[layout], arguments[1:3])
    check_attention(queue, arguments, starts)


def test_rows_of_no_sequence_are_untouched(kernel, queue, rng):
    arguments, _ = batch(rng, [3, 2, 4], [2, 2, 3])
    check_attention(queue, arguments, {"query_start_loc": np.array([1, 2, 2, 4], "i4")})


def test_starts_that_make_no_sense(kernel, queue, rng):
    """Starts that fall, repeat or lie beyond the tokens: what is read and written stays within the arrays."""
    arguments, _ = batch(rng, [6, 6], [3, 3])
    for starts in ([0, 100, 200], [-5, 2, 4], [7, 8, 9], [0, 0, 0]):
        check_attention(queue, arguments, {"query_start_loc": np.array(starts, "i4")})


def test_blocks_that_are_not_there(kernel, queue, rng):
    """flash-attention #2711: lengths beyond the block table, and blocks beyond the cache, are left out."""
    arguments, _ = batch(rng, [12, 9], surplus=0)
    table = arguments[3]
    table[0, 1], table[1, 0] = -1, len(arguments[1])
    check_attention(queue, arguments, {})
    arguments[4][:] = 13, 2**31 - 1
    table[0, 1], table[1, 0] = table[0, 0], table[0, 2]
    (_, *rest) = arguments
    out = paged_attention(*[to_device(each, queue) for each in arguments])
    wanted, _ = reference.paged_attention(arguments[0], *rest[:3], [12, 12])
    np.testing.assert_allclose(arrays.to_numpy(out)[:1], wanted[:1], atol=1e-5)


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_faults_stay_where_they_are(kernel, queue, rng, fault):
    """A key that is not finite spoils the tokens that see it, and no other token, head or sequence."""
    arguments, starts = batch(rng, [6, 5], [6, 5])
    table = arguments[3]
    clean = paged_attention(
        *[to_device(each, queue) for each in arguments],
        query_start_loc=to_device(starts["query_start_loc"], queue),
    )
    arguments[1][table[0, 0], 3, 1, 2] = fault
    found = paged_attention(
        *[to_device(each, queue) for each in arguments],
        query_start_loc=to_device(starts["query_start_loc"], queue),
    )
    clean, found = arrays.to_numpy(clean), arrays.to_numpy(found)
    np.testing.assert_array_equal(found[:3], clean[:3])
    np.testing.assert_array_equal(found[6:], clean[6:])
    np.testing.assert_array_equal(found[:, :2], clean[:, :2])
    if np.isnan(fault):
        assert np.isnan(found[3:6, 2:]).all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("runner", ["plain", "packaged"], indirect=True)
def test_nan_of_any_bits_stays_nan_in_bfloat16(runner, kernel, queue, rng, bits):
    """Rounded like a number, some of them would become infinity or zero."""
    arguments, _ = batch(rng, [3], q_heads=1, kv_heads=1)
    arguments[0] = reference.from_float32(arguments[0], "bfloat16")
    arguments[2].view("u4")[...] = bits
    found = paged_attention(*[to_device(each, queue) for each in arguments], dtype="bfloat16")
    assert np.isnan(reference.as_float32(arrays.to_numpy(found), "bfloat16")).all()


@pytest.mark.parametrize("length", [1, 5, 7, 8, 13, 17])
def test_an_infinite_value_in_the_newest_row(kernel, queue, rng, length):
    """It is in the result once: infinity, and not NaN, as where it were added again with a weight of 0."""
    arguments, _ = batch(rng, [length], block_size=16)
    value_cache, table = arguments[2:4]
    value_cache[table[0, (length - 1) // 16], (length - 1) % 16, 1, 3] = np.inf
    out = arrays.to_numpy(paged_attention(*[to_device(each, queue) for each in arguments]))
    assert np.isposinf(out[0, 2:, 3]).all()
    out[0, 2:, 3] = 0
    assert np.isfinite(out).all()


def test_scores_of_minus_infinity_are_left_out(kernel, queue, rng):
    arguments, _ = batch(rng, [9], q_heads=1, kv_heads=1)
    arguments[0][...] = 1
    arguments[1][arguments[3][0, 0], :2] = -np.inf
    check_attention_finite(queue, arguments, 7)
    arguments[1][arguments[3][0, :3]] = -np.inf
    check_attention_finite(queue, arguments, 0)


def check_attention_finite(queue, arguments, count):
    out, lse = paged_attention(*[to_device(each, queue) for each in arguments], return_lse=True)
    wanted = reference.paged_attention(*arguments)
    for own, other in zip((out, lse), wanted):
        np.testing.assert_allclose(arrays.to_numpy(own), other, rtol=1e-5, atol=1e-6)
    assert np.isneginf(wanted[1]).all() == (count == 0)


def test_results_do_not_depend_on_the_batch(kernel, queue, rng):
    """The bits of a sequence alone, and among others, and again; the longest is otherwise cut into parts."""
    arguments, _ = batch(rng, [40, 3, 25, 1061], head_size=64)
    query, *caches, table, lens = (to_device(each, queue) for each in arguments)
    once = paged_attention(query, *caches, table, lens)
    np.testing.assert_array_equal(
        arrays.to_numpy(once), arrays.to_numpy(paged_attention(query, *caches, table, lens))
    )
    together = [arrays.to_numpy(paged_attention(query, *caches, table, lens, batch_invariant=True))] * 2
    for sequence in range(4):
        own = slice(sequence, sequence + 1)
        alone = paged_attention(query[own], *caches, table[own], lens[own], batch_invariant=True)
        np.testing.assert_array_equal(arrays.to_numpy(alone), together[0][own])


def test_the_bits_of_plain_python(queue, rng):
    """The general kernel uses fma and integer arithmetic in a fixed order: devices agree to the bit."""
    from functools import partial

    from conftest import described
    from helpers import PlainLaunch
    from kvcache_dpex.ops.calls import launch_of

    if not queue.sycl_device.is_cpu:
        pytest.skip("plain Python reads the memory of the CPU device only")
    arguments, _ = batch(rng, [11, 6], head_size=8)
    device = [to_device(each, queue) for each in arguments]
    options = {"soft_cap": 2.0, "sinks": to_device(np.array([0, 1, 2, 3], "f4"), queue), "return_lse": True}
    with using(variant="paged_attention_strided"):
        found = paged_attention(*device, **options)
    with using(launch=partial(launch_of, load=described, new=PlainLaunch), variant="paged_attention_strided"):
        plain = paged_attention(*device, **options)
    for own, other in zip(found, plain):
        np.testing.assert_array_equal(arrays.to_numpy(own), arrays.to_numpy(other))


def test_long_contexts_in_parts(queue, rng):
    """A context that is cut into parts, of which some are empty, beside a short one."""
    for lens in ([1500], [700, 3], [2, 1023, 0]):
        arguments, _ = batch(rng, lens, head_size=64, block_size=16, surplus=60)
        check_attention(queue, arguments, {})
        check_attention(queue, arguments, {"sliding_window": 300, "sinks": np.array([1, 0, 3, 2], "f4")})


def test_tokens_in_turns(queue, rng, monkeypatch):
    """With little scratch memory, tokens are taken a few at a time."""
    arguments, starts = batch(rng, [9, 30, 4], [5, 7, 1], head_size=16)
    monkeypatch.setattr(attention_plans, "MOST_SCRATCH", 3 * 4 * 4 * 48)
    with using(variant="paged_attention_cpu"):
        check_attention(queue, arguments, starts)


@pytest.mark.parametrize(("num_blocks", "in_parts"), [(2**27 - 1, True), (2**27, False)])
def test_slots_that_the_kernel_of_cpus_cannot_count(queue, num_blocks, in_parts):
    """2**31 slots; no memory is needed to see which kernel is chosen."""

    def operand(shape, dtype):
        return Operand(shape, contiguous_strides(shape), np.dtype(dtype), queue)

    names = [parameter.name for parameter in paged_attention.operation.parameters]
    given = {
        "query": operand((1, 2, 16), "f4"),
        "key_cache": operand((num_blocks, 16, 1, 16), "f4"),
        "value_cache": operand((num_blocks, 16, 1, 16), "f4"),
        "block_table": operand((1, 1), "i4"),
        "seq_lens": operand((1,), "i4"),
        "out": operand((1, 2, 16), "f4"),
    }
    with using(variant="paged_attention_cpu"):
        found = attention_plans.plan(**{**dict.fromkeys(names), **given}, alignment=16)
    assert isinstance(found, Steps) == in_parts


@pytest.mark.parametrize(
    ("groups", "tokens", "capacity", "splits"),
    [(8, 1, 4096, 8), (8, 1, 16, 1), (8, 1, 512, 2), (8, 3, 4096, 3), (8, 8, 4096, 1), (8, 500, 4096, 1)],
)
def test_splits(groups, tokens, capacity, splits):
    assert splits_of(groups, tokens, capacity) == splits


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_batches(queue, data):
    """Lengths of 0 and 1, at the ends of blocks, and long ones, in any mixture."""
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    ends = st.integers(0, 4).map(lambda blocks: blocks * block_size)
    seq_lens = data.draw(st.lists(st.integers(0, 70) | ends, min_size=1, max_size=5))
    decode = data.draw(st.booleans())
    query_lens = None if decode else [data.draw(st.integers(0, min(length, 9))) for length in seq_lens]
    kv_heads = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    arguments, starts = batch(
        rng,
        seq_lens,
        query_lens,
        block_size=block_size,
        kv_heads=kv_heads,
        q_heads=kv_heads * data.draw(st.integers(1, 4)),
        head_size=data.draw(st.sampled_from([5, 16, 64, 128])),
    )
    value = data.draw(st.sampled_from(VALUES))
    arguments, scales = as_cache(arguments, data.draw(st.sampled_from([value, "int8", "fp8"])))
    window = data.draw(st.none() | st.integers(1, 80))
    cap = data.draw(st.none() | st.floats(0.1, 50))
    options = {
        **starts,
        **scales,
        **({"sliding_window": window} if window else {}),
        **({"soft_cap": cap} if cap else {}),
    }
    check_attention(queue, arguments, options, value=value)
