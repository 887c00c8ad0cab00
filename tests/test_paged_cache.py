"""PagedCache: what is appended is read back, attention sees it, and errors change nothing."""

import numpy as np
import pytest

import kvcache_dpex as kv
from caching import (
    FORMATS,
    HEADS,
    KINDS,
    SIZES,
    advance,
    assert_holds,
    exact_rows,
    new_cache,
    on_device,
    prefixes_of,
    to_float32,
)
from kvcache_dpex import reference


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


def test_append_fork_crop_free(kind, format, queue):
    """Prefixes are shared, and a block is copied in all layers when one of two holders writes to it."""
    cache = new_cache(kind, format, queue)
    held = {}
    assert advance(cache, {"a": [1, 2, 3, 4, 5], "b": [7]}, held).start == {"a": 0, "b": 0}
    held = {"a": [1, 2, 3, 4, 5], "b": [7]}
    assert_holds(cache, held)
    cache.fork("a", "c")
    held["c"] = list(held["a"])
    advance(cache, {"c": [6], "a": [9, 9], "b": []}, held)
    held["c"] += [6]
    held["a"] += [9, 9]
    assert_holds(cache, held)
    cache.crop("a", 4)
    del held["a"][4:]
    assert advance(cache, {"a": [8], "d": [1, 2, 3, 0]}, held).start == {"a": 4, "d": 3}
    held["a"] += [8]
    held["d"] = [1, 2, 3, 0]
    assert_holds(cache, held)
    for name in list(held):
        cache.free(name)
        del held[name]
        assert_holds(cache, held)
    assert cache.pool.stats().used == 0


@pytest.mark.parametrize("window", [None, 4])
def test_attention_is_that_of_the_tokens(kind, format, queue, window):
    """A prompt in two parts, a decoding step and a new prompt in one step, against the oracle."""
    cache = new_cache(kind, format, queue, sliding_window=window)
    advance(cache, {"a": [1, 2, 3, 4, 5], "b": [7, 7]}, {})
    new, held = {"b": [8], "c": [3, 3, 3], "a": [6, 7]}, {"a": [1, 2, 3, 4, 5], "b": [7, 7], "c": []}
    query = np.random.default_rng(3).standard_normal((6, 2 * HEADS, SIZES[0])).astype(np.float32)
    histories = {name: [*held[name], *new[name]] for name in new}
    with cache.step(new) as step:
        prefixes = [
            each for name, tokens in histories.items() for each in prefixes_of(tokens, step.start[name])
        ]
        for layer in range(2):
            rows = [on_device(cache, exact_rows(prefixes, layer, size, format)) for size in SIZES]
            step.append(layer, *rows)
            found = to_float32(step.attend(layer, on_device(cache, query), scale=0.01))
            contiguous = [np.zeros((3, 8, HEADS, size), np.float32) for size in SIZES]
            for at, tokens in enumerate(histories.values()):
                for each, size in zip(contiguous, SIZES):
                    each[at, : len(tokens)] = exact_rows(prefixes_of(tokens), layer, size, format)
            expected, _ = reference.paged_attention(
                to_float32(on_device(cache, query)),
                *contiguous,
                np.arange(3, dtype=np.int32)[:, None],
                np.array([len(tokens) for tokens in histories.values()], np.int32),
                query_start_loc=np.array([0, 1, 4, 6], np.int32),
                scale=0.01,
                sliding_window=window,
            )
            rounding = {"float16": 2**-10, "bfloat16": 2**-7}.get(format, 2**-18)
            bound = rounding * np.abs(contiguous[1]).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def test_a_window_releases_blocks(kind, queue):
    cache = new_cache(kind, "int8_per_token_head", queue, num_blocks=3, sliding_window=2)
    held = {"a": []}
    for first in range(0, 24, 4):
        tokens = list(range(first, first + 4))
        advance(cache, {"a": tokens}, held)
        held["a"] += tokens
        assert_holds(cache, held)
    with cache.step({"a": 0 * [1]}) as step:
        step.append(0, *(on_device(cache, np.empty((0, HEADS, size), np.float32)) for size in SIZES))
    assert cache.pool.block_table("a") == [-1] * 7 + [cache.pool.block_table("a")[7]]


def test_a_step_that_fails_leaves_the_sequences_as_they_were(kind, queue):
    cache = new_cache(kind, "float32", queue)
    advance(cache, {"a": [1, 2, 3, 4]}, {})
    cache.fork("a", "b")
    held = {"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}
    rows = [on_device(cache, np.full((3, HEADS, size), 7, np.float32)) for size in SIZES]
    steps = {"a": [5], "b": [6], "c": [9]}
    with pytest.raises(ZeroDivisionError):
        append_to_one_layer(cache, steps, rows, lambda: 1 / 0)
    assert_holds(cache, held)
    with pytest.raises(RuntimeError, match=r"^every layer must be appended .* layers \[1\] were not"):
        append_to_one_layer(cache, steps, rows, list)
    assert_holds(cache, held)
    with pytest.raises(kv.OutOfBlocks), cache.step({"new": [1], "a": [1] * 20}):
        pass
    assert_holds(cache, held)
    with pytest.raises(TypeError), cache.step({"new": [1], "newer": ["x"]}):
        pass
    assert_holds(cache, held)
    advance(cache, {"a": [5], "b": [6]}, held)
    assert_holds(cache, {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 6]})


def append_to_one_layer(cache, tokens, rows, then):
    with cache.step(tokens) as step:
        step.append(0, *rows)
        then()


def test_drafts_are_dropped_before_a_window_releases_anything(kind, queue):
    cache = new_cache(kind, "float32", queue, sliding_window=3)
    advance(cache, {"a": [1, 2, 3]}, {})
    with cache.step({"a": [4, 5, 6, 7, 8]}) as step:
        prefixes = prefixes_of([1, 2, 3, 4, 5, 6, 7, 8], 3)
        for layer in range(2):
            step.append(
                layer, *(on_device(cache, exact_rows(prefixes, layer, size, "float32")) for size in SIZES)
            )
        cache.crop("a", 4)
    assert_holds(cache, {"a": [1, 2, 3, 4]})
    assert cache.pool.block_table("a").count(-1) == 0


def test_extra_keys_keep_sequences_apart(kind, queue):
    cache = new_cache(kind, "float32", queue)
    rows = [on_device(cache, np.ones((4, HEADS, size), np.float32)) for size in SIZES]

    def start(name, keys):
        with cache.step({name: [1, 2, 3, 4]}, extra_keys=keys) as step:
            given = [each[step.start[name] :] for each in rows]
            for layer in range(2):
                step.append(layer, *given)
        return step.start[name]

    assert start("a", {"a": {0: "adapter"}}) == 0
    assert start("b", None) == 0
    assert start("c", {"c": {0: "adapter"}}) == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "int3"}, ValueError, "`format` must be one of float32, .*, got 'int3'"),
        ({"inline": "NHD"}, ValueError, "`inline` must be None for format 'float32'.*, got 'NHD'"),
        ({"num_layers": 0}, ValueError, "`num_layers` must be >= 1, got 0"),
        ({"num_blocks": 0}, ValueError, "`num_blocks` must be >= 1, got 0"),
        ({"block_size": 1.5}, TypeError, "`block_size` must be an int, got float"),
    ],
)
def test_a_cache_says_what_does_not_fit(queue, options, error, message):
    given = {"num_layers": 1, "num_blocks": 2, "block_size": 2, "num_kv_heads": 1, "head_size": 8}
    with pytest.raises(error, match=message):
        kv.PagedCache(**{**given, **options}, device=queue)


def test_a_step_says_what_does_not_fit(kind, queue):
    cache = new_cache(kind, "float32", queue)
    more = [on_device(cache, np.ones((3, HEADS, size), np.float32)) for size in SIZES]
    rows = [each[:2] for each in more]
    query = on_device(cache, np.ones((3, HEADS, SIZES[0]), np.float32))
    with cache.step({"a": [1, 2]}) as step:
        with pytest.raises(IndexError, match="`layer` must be < 2, got 2"):
            step.append(2, *rows)
        for value in (rows[1][:1], more[1]):
            with pytest.raises(ValueError, match=r"`value` must have a row for each of the 2 new tokens"):
                step.append(0, rows[0], value)
        with pytest.raises(ValueError, match=r"`key` must have a row for each of the 2 new tokens"):
            step.append(0, *more)
        with pytest.raises(RuntimeError, match="layer 0 must have the keys and values"):
            step.attend(0, query[:2])
        for call in (lambda: cache.free("a"), lambda: cache.fork("a", "b"), cache.step({"c": 1}).__enter__):
            with pytest.raises(RuntimeError, match=r"must not be called inside of a step"):
                call()
        for layer in range(2):
            step.append(layer, *rows)
        for few_or_many in (query[:1], query):
            with pytest.raises(ValueError, match=r"`query` must have a row for each of the 2 new tokens"):
                step.attend(0, few_or_many)
    with pytest.raises(RuntimeError, match="the step has ended"):
        step.attend(0, query[:2])
    with pytest.raises(ValueError, match="`tokens` must name at least one sequence"), cache.step({}):
        pass
    with pytest.raises(ValueError, match="`dtype` must be None for format 'float32'"):
        cache.rows(0, "a", dtype="float16")
