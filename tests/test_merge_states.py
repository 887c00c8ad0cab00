"""merge_attention_states against the oracle and against attention to everything."""

import numpy as np
import pytest

from attending import batch
from helpers import Twins, sentinel, to_device
from kvcache_dpex import merge_attention_states, paged_attention, reference
from kvcache_dpex.runtime.launch import arrays
from quantizing import VALUES, option, stored


@pytest.fixture
def rng():
    return np.random.default_rng(8)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 7), (2, 4, 128), (3, 1, 576)])
@pytest.mark.parametrize("dtype", VALUES)
def test_every_type(runner, queue, rng, dtype, shape):
    """Also where one part or both are empty: NaN beside an lse of -inf is not read."""
    outs = [stored(rng.standard_normal(shape), dtype) for _ in range(2)]
    states = [rng.uniform(-30, 30, shape[:2]).astype("f4") for _ in range(2)]
    states[0][0, 0] = -np.inf
    outs[0][0, 0] = stored(np.full(shape[2], np.nan), dtype)
    states[1][-1, -1] = -np.inf
    outs[1][-1, -1] = stored(np.full(shape[2], np.nan), dtype)
    host = outs[0], states[0], outs[1], states[1]
    found = merge_attention_states(*[to_device(each, queue) for each in host], **option(dtype))
    out, lse = reference.merge_attention_states(*host, **option(dtype))
    u = {"float32": 2.0**-21, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    values = reference.as_float32(arrays.to_numpy(found[0]), dtype)
    largest = np.max([np.nan_to_num(abs(reference.as_float32(each, dtype))) for each in outs], axis=0)
    # exp2 of a difference of up to 87 scores is off by 87 units.
    assert (abs(values - out) <= largest * (100 * 2.0**-23 + u)).all()
    np.testing.assert_allclose(arrays.to_numpy(found[1]), lse, rtol=4e-7, atol=1e-6)


def test_parts_of_a_context_are_the_whole(queue, rng):
    """A prefix and the rest, attended to separately."""
    arguments, _ = batch(rng, [16, 13, 4], q_heads=6, kv_heads=2, head_size=16)
    query, key_cache, value_cache, table, lens = arguments
    device = [to_device(each, queue) for each in (query, key_cache, value_cache)]
    parts = []
    for columns, part_lens in ((slice(0, 2), np.minimum(lens, 8)), (slice(2, None), np.maximum(lens - 8, 0))):
        part = (
            to_device(np.ascontiguousarray(table[:, columns]), queue),
            to_device(part_lens.astype("i4"), queue),
        )
        parts += paged_attention(*device, *part, return_lse=True)
    merged = merge_attention_states(*parts)
    for own, other in zip(merged, reference.paged_attention(*arguments)):
        np.testing.assert_allclose(arrays.to_numpy(own), other, rtol=2e-6, atol=2e-6)


def test_results_where_they_are_wanted(queue, rng):
    out, lse = rng.standard_normal((2, 3, 4)).astype("f4"), np.zeros((2, 3), "f4")
    device = [to_device(each, queue) for each in (out, lse)]
    wanted = to_device(np.empty_like(out), queue), to_device(np.empty_like(lse), queue)
    found = merge_attention_states(*device, *device, out=wanted[0], lse=wanted[1])
    assert found[0] is wanted[0]
    assert found[1] is wanted[1]
    np.testing.assert_array_equal(arrays.to_numpy(found[0]), out)


@pytest.mark.parametrize("name", ["out_b", "lse_a", "lse_b", "out", "lse"])
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_every_array_must_fit(queue, name, change):
    """Nothing is written where one of them does not."""
    shapes = {"out_a": (2, 3, 4), "lse_a": (2, 3), "out_b": (2, 3, 4), "lse_b": (2, 3)}
    shapes.update(out=(2, 3, 4), lse=(2, 3))
    host = {each: sentinel(shape, "float32") for each, shape in shapes.items()}
    if change == "dtype":
        host[name] = sentinel(shapes[name], "int32")
    else:
        host[name] = sentinel((2, 2, *shapes[name][2:]), "float32")
    twins = Twins(queue)
    with pytest.raises(TypeError if change == "dtype" else ValueError, match=f"^`{name}` must "):
        merge_attention_states(**{each: twins.view(array) for each, array in host.items()})
    twins.assert_equal()
