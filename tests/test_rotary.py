"""rotary_and_cache and concat_and_cache_mla against the oracle, bit for bit, over a sentinel."""

import numpy as np
import pytest

import kvcache_dpex as kv
from helpers import Twins, random_bits, sentinel, to_device
from kvcache_dpex import reference
from kvcache_dpex.ops import calls
from kvcache_dpex.ops.operation import using
from quantizing import VALUES, option, rows_of, stored


@pytest.fixture
def rng():
    return np.random.default_rng(14)


def table_of(rng, count, rotary_dim):
    angles = rng.uniform(-9, 9, (count, rotary_dim // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype("f4")


def case(rng, dtype, index="i8", size=16, value_size=None, rotary_dim=None, q_heads=4, heads=2):
    """A fused qkv, caches, positions and slots, all kinds of each among them."""
    sizes = [q_heads * size, heads * size, heads * (value_size or size)]
    qkv = stored(rng.standard_normal((6, sum(sizes))), dtype)
    query, key, value = np.split(qkv, np.cumsum(sizes)[:2], axis=1)
    rows = [each.reshape(6, count, -1) for each, count in ((query, q_heads), (key, heads), (value, heads))]
    caches = [sentinel((3, 4, heads, each), qkv.dtype) for each in (size, value_size or size)]
    positions = np.array([8, 0, 3, 9, -1, 5], index)
    slots = np.array([3, 11, -1, 5, 6], index)
    return positions, *rows, table_of(rng, 9, rotary_dim or size), *caches, slots


@pytest.mark.parametrize("interleaved", [False, True], ids=["NeoX", "GPT-J"])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (7, 5, 4), (10, 33, 2), (1, 1, 0), (128, 128, 64)], ids=str)
@pytest.mark.parametrize("dtype", VALUES)
def test_bits(runner, queue, rng, dtype, sizes, interleaved):
    size, value_size, rotary_dim = sizes
    host = case(rng, dtype, size=size, value_size=value_size)
    host = (*host[:4], table_of(rng, 9, rotary_dim), *host[5:])
    twins = Twins(queue)
    kv.rotary_and_cache(*(twins.view(each) for each in host), interleaved=interleaved, **option(dtype))
    reference.rotary_and_cache(*host, interleaved=interleaved, **option(dtype))
    twins.assert_equal()


@pytest.mark.parametrize("index", ["i4", "i8"])
def test_one_launch(queue, rng, index):
    host = case(rng, "float32", index)
    launched = []

    def launch(plan):
        launched.append(plan)
        return calls.launch_of(plan)

    twins = Twins(queue)
    with using(launch=launch):
        kv.rotary_and_cache(*(twins.view(each) for each in host))
    assert len(launched) == 1
    reference.rotary_and_cache(*host)
    twins.assert_equal()


def test_the_oracle_is_the_textbook_s(rng):
    """Pairs as complex numbers, turned in float64."""
    for interleaved in (False, True):
        positions, query, *rest = case(rng, "float32", rotary_dim=12)
        before, table = query.astype("f8"), rest[2].astype("f8")
        reference.rotary_and_cache(positions, query, *rest, interleaved=interleaved)
        pairs = (slice(0, 12, 2), slice(1, 12, 2)) if interleaved else (slice(6), slice(6, 12))
        for token, position in enumerate(positions):
            turn = table[position, :6] + 1j * table[position, 6:] if 0 <= position < 9 else 1
            turned = (before[token][:, pairs[0]] + 1j * before[token][:, pairs[1]]) * turn
            np.testing.assert_allclose(query[token][:, pairs[0]], turned.real, atol=1e-6)
            np.testing.assert_allclose(query[token][:, pairs[1]], turned.imag, atol=1e-6)
        np.testing.assert_array_equal(query[..., 12:], before[..., 12:])


@pytest.mark.parametrize("dtype", ["u1", "u2", "f4"])
def test_latents_beside_rope_keys(runner, queue, rng, dtype):
    latent, rope = random_bits(rng, (5, 36), dtype), random_bits(rng, (5, 12), dtype)
    kv_cache = sentinel((3, 4, 48), dtype)
    slots = np.array([11, -1, 0, 12, 5])
    twins = Twins(queue)
    kv.concat_and_cache_mla(*(twins.view(each) for each in (latent, rope, kv_cache, slots)))
    reference.concat_and_cache_mla(latent, rope, kv_cache, slots)
    twins.assert_equal()


@pytest.mark.parametrize("format", ["int8_per_token_head", "fp8_per_token_head"])
def test_latents_and_rope_keys_as_codes(runner, queue, rng, format):
    latent, rope = rows_of(rng, (5, 48), "float32"), rows_of(rng, (5, 16), "float32")
    codes = "u1" if format.startswith("fp8") else "i1"
    kv_cache, scales = sentinel((3, 4, 64), codes), sentinel((12, 2), "f4")
    slots = np.array([11, -1, 0, 12, 5])
    twins = Twins(queue)
    *given, of_scales = (twins.view(each) for each in (latent, rope, kv_cache, slots, scales))
    kv.concat_and_cache_mla(*given, scales=of_scales, format=format)
    split = latent[:, None], rope[:, None], kv_cache[:, :, None, :48], kv_cache[:, :, None, 48:]
    with np.errstate(all="ignore"):
        reference.reshape_and_cache_quant(*split, scales[:, :1], scales[:, 1:], slots, format=format)
    twins.assert_equal()


def test_rotations_that_are_refused(queue, rng):
    names = [
        "positions",
        "query",
        "key",
        "value",
        "cos_sin_cache",
        "key_cache",
        "value_cache",
        "slot_mapping",
    ]
    host = dict(zip(names, case(rng, "float32")))
    for name, other, error, message in (
        ("positions", np.zeros(6, "i4"), TypeError, "`positions` must be int64, got int32"),
        ("positions", np.zeros(5, "i8"), ValueError, r"`positions` must have shape \[num_tokens\] = \[6\]"),
        ("query", np.zeros((6, 4, 8), "f4"), ValueError, "`query` must have shape"),
        ("query", np.zeros((6, 4, 16), "f2"), TypeError, "`query` must have the dtype of `key`, float32"),
        ("cos_sin_cache", np.zeros((9, 18), "f4"), ValueError, "`cos_sin_cache` must have shape"),
        ("cos_sin_cache", np.zeros((9, 5), "f4"), ValueError, "`cos_sin_cache` must have shape"),
        ("cos_sin_cache", np.zeros((9, 16), "f2"), TypeError, "`cos_sin_cache` must be float32, got float16"),
    ):
        given = {each: to_device(np.ascontiguousarray(array), queue) for each, array in host.items()}
        given[name] = to_device(other, queue)
        with pytest.raises(error, match=message):
            kv.rotary_and_cache(**given)


def test_latents_that_are_refused(queue):
    latent, rope, cache, slots = (
        to_device(np.zeros(shape, kind), queue)
        for shape, kind in (((2, 8), "f4"), ((2, 4), "f4"), ((3, 4, 12), "f4"), (2, "i8"))
    )
    with pytest.raises(ValueError, match=r"`kv_cache` must have shape \[num_blocks, block_size, 16\]"):
        kv.concat_and_cache_mla(latent, latent, cache, slots)
    with pytest.raises(ValueError, match=r"`kv_c` must have shape \[num_tokens, size\], got \[3, 4, 12\]"):
        kv.concat_and_cache_mla(cache, rope, cache, slots)
    with pytest.raises(ValueError, match=r"`scales` must have shape \[num_blocks \* block_size, 2\]"):
        kv.concat_and_cache_mla(latent, rope, cache, slots, scales=latent)
    with pytest.raises(ValueError, match="`dtype` and `format` are for codes"):
        kv.concat_and_cache_mla(latent, rope, cache, slots, dtype="bfloat16")
