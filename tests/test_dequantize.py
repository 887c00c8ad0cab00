"""dequant_cache against the reference: whole results over a sentinel fill, chosen blocks, strided arrays."""

import numpy as np
import pytest

from helpers import random_bits, sentinel, to_device
from kvcache_dpex import dequant_cache, dequant_caches, empty_quant_cache, reference, reshape_and_cache_quant
from kvcache_dpex.layout import slots_of_sequence
from kvcache_dpex.ops.operation import using
from kvcache_dpex.runtime.launch import arrays
from quantizing import VALUES, check_dequantize, quantize_case, rows_of
from test_quantize_views import SCALES, name_of
from test_write_views import BLOCK_SIZE, BLOCKS, CACHES, HEADS

STORAGE = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}


@pytest.fixture
def rng():
    return np.random.default_rng(40)


@pytest.fixture(params=["dequantize_gpu", "dequantize_gpu_float32", "dequantize_cpu", "dequantize_strided"])
def decoder(request):
    """A GPU's kernel, a CPU's, and the general one, which takes every case."""
    if "runner" in request.fixturenames:
        request.getfixturevalue("runner")
    with using(variant=request.param):
        yield request.param


def decode_case(rng, dtype, *, blocks=5, block_size=4, heads=2, size=8, shown=()):
    """Codes and scales of any bits at all, and a sentinel-filled result of the blocks that are shown."""
    shape = (blocks, block_size, heads, size)
    codes = random_bits(rng, shape, "int8")
    scales = random_bits(rng, (blocks * block_size, heads), "float32")
    # Half of them of the size that scales have.
    usual = rng.uniform(-1, 1, scales.shape).astype("f4")
    scales = np.where(rng.integers(0, 2, scales.shape), scales, usual)
    return codes, scales, sentinel((*(shown or (blocks,)), *shape[1:]), STORAGE[dtype])


@pytest.mark.parametrize("size", [8, 3])
@pytest.mark.parametrize("dtype", VALUES)
def test_every_dtype(runner, decoder, queue, rng, dtype, size):
    check_dequantize(queue, *decode_case(rng, dtype, size=size), dtype=dtype)


@pytest.mark.parametrize("heads", [1, 13])
@pytest.mark.parametrize("size", [1, 3, 46, 64, 80, 96, 112, 120, 128, 192, 256, 576, 1025])
def test_every_head_size(decoder, queue, rng, size, heads):
    for dtype in VALUES:
        case = decode_case(rng, dtype, blocks=3, block_size=2, heads=heads, size=size)
        check_dequantize(queue, *case, dtype=dtype)


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("like", ["dpnp", "usm_ndarray"])
def test_a_new_array(queue, rng, like, dtype):
    """Of the kind of `q`, on its queue; float32 unless told otherwise."""
    codes, scales, _ = decode_case(rng, dtype)
    device = [to_device(array, queue) for array in (codes, scales)]
    if like == "dpnp":
        device = [arrays.as_dpnp(array) for array in device]
    result = dequant_cache(*device, dtype=dtype)
    assert type(result) is type(device[0])
    assert (result.dtype, result.sycl_queue) == (STORAGE[dtype], queue)
    with np.errstate(all="ignore"):
        wanted = reference.dequant_cache(codes, scales, dtype=dtype)
    np.testing.assert_array_equal(arrays.to_numpy(result).view("u1"), wanted.view("u1"))
    assert dequant_cache(*device).dtype == np.float32


TABLES = {
    "list": [3, 0, 4],
    "the same block twice": [1, 1],
    "padding": [2, -1, 0, -7],
    "beyond": [5, 4, 2**31 - 1, -(2**31)],
    "table": [[0, 3, -1], [4, 1, 2]],
    "three axes": [[[0], [9]], [[4], [3]]],
    "one": 3,
    "none": [],
    "no rows": np.zeros((0, 3)),
}


@pytest.mark.parametrize("block_dtype", ["int32", "int64"])
@pytest.mark.parametrize("table", TABLES)
def test_chosen_blocks(decoder, queue, rng, table, block_dtype):
    """Result block n is block blocks[n]; zeros where there is none. Nothing else is read."""
    blocks = np.array(TABLES[table], block_dtype)
    for dtype, size in (("float32", 8), ("float16", 5), ("bfloat16", 4)):
        codes, scales, _ = decode_case(rng, dtype, size=size)
        out = sentinel((*blocks.shape, *codes.shape[1:]), STORAGE[dtype])
        check_dequantize(queue, codes, scales, out, blocks=blocks, dtype=dtype)


@pytest.mark.parametrize("runner", ["plain", "packaged"], indirect=True)
@pytest.mark.parametrize("table", ["padding", "beyond", "table"])
def test_chosen_blocks_in_every_runner(runner, decoder, queue, rng, table):
    blocks = np.array(TABLES[table], "int32")
    codes, scales, _ = decode_case(rng, "float16", size=4)
    check_dequantize(queue, codes, scales, sentinel((*blocks.shape, 4, 2, 4), "float16"), blocks=blocks)


def test_blocks_far_beyond(decoder, queue, rng):
    """64-bit numbers that are blocks of the cache once cut to 32 bits."""
    blocks = np.array([2**32, -(2**32) + 1, 2**63 - 1, -(2**63), 2])
    codes, scales, out = decode_case(rng, "float32")
    check_dequantize(queue, codes, scales, out, blocks=blocks)
    assert not out[:4].any()


@pytest.mark.parametrize("step", [np.s_[::2], np.s_[::-1], np.s_[5::-3], np.s_[1:4]], ids=str)
def test_blocks_of_any_stride(decoder, queue, rng, step):
    blocks = np.array([3, 0, 4, -1, 2, 1])[step]
    check_dequantize(queue, *decode_case(rng, "float32", shown=blocks.shape), blocks=blocks)


@pytest.mark.parametrize("columns", [np.s_[:, 0], np.s_[:1, ::2], np.s_[:, :]], ids=str)
def test_parts_of_a_block_table(decoder, queue, rng, columns):
    blocks = np.array([[3, 0, 4], [-1, 2, 1]], "int32")[columns]
    check_dequantize(queue, *decode_case(rng, "float32", shown=blocks.shape), blocks=blocks)


@pytest.mark.parametrize("shown", [None, np.array([2, -1, 4])], ids=["all", "chosen"])
@pytest.mark.parametrize("make_caches", CACHES, ids=name_of)
@pytest.mark.parametrize("size", [8, 3])
def test_codes_and_results_of_every_layout(decoder, queue, rng, make_caches, size, shown):
    """Strided codes, then a strided `out`, whose neighbours stay.

    vllm-xpu-kernels #429, vllm-xpu-kernels #258, numba-dpex #572.
    """
    codes, scales, out = decode_case(rng, "float32", size=size)
    strided = make_caches("int8", size)[1]
    strided[...] = codes
    place = make_caches("float32", size)[1]
    if shown is not None:
        out, place = out[: shown.size], place[: shown.size]
    check_dequantize(queue, strided, scales, out, blocks=shown)
    check_dequantize(queue, codes, scales, place, blocks=shown)


@pytest.mark.parametrize("make_scales", SCALES, ids=name_of)
def test_scales_of_every_layout(decoder, queue, rng, make_scales):
    shape = (BLOCKS, BLOCK_SIZE, HEADS, 8)
    for scales in make_scales():
        scales[...] = rng.standard_normal(scales.shape)
        for blocks in (None, np.array([4, 0, -1])):
            out = sentinel((shape[0] if blocks is None else 3, *shape[1:]), "float16")
            check_dequantize(queue, random_bits(rng, shape, "int8"), scales, out, blocks=blocks)


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("dtype", VALUES)
def test_any_alignment(queue, rng, dtype, offset):
    codes, scales, out = decode_case(rng, dtype, size=16)
    moved = random_bits(rng, codes.size + offset, "int8")[offset:].reshape(codes.shape)
    place = sentinel(out.size + offset, STORAGE[dtype])[offset:].reshape(out.shape)
    check_dequantize(queue, moved, scales, out, dtype=dtype)
    check_dequantize(queue, codes, scales, place, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_once_to_nearest_even(decoder, queue, rng, dtype):
    """Scales from the least subnormal to the largest number, so results overflow, vanish and tie."""
    blocks = 64
    codes = rng.integers(-128, 128, (blocks, 4, 1, 16)).astype("int8")
    powers = np.ldexp(np.float32(1), np.arange(blocks * 4) - 148).astype("f4")
    for scales in (powers, powers * np.float32(1.0625), np.nextafter(powers, np.float32(np.inf))):
        out = sentinel(codes.shape, STORAGE[dtype])
        check_dequantize(queue, codes, scales[:, None], out, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "scale", "wanted"),
    [
        ("float32", 2.0**121, [127 * 2.0**121, -(2.0**128)]),
        ("float16", 516, [np.inf, -np.inf]),
        ("float16", 515.77954, [65504, -np.inf]),
        ("bfloat16", 2.0**121, [0x7F7E, 0xFF80]),
        ("float16", 2.0**-33, [0, -0.0]),
        ("float16", np.nan, [np.nan, np.nan]),
        ("float32", np.inf, [np.nan, np.nan]),
        ("bfloat16", -np.inf, [0x7FC0, 0x7FC0]),
    ],
)
def test_results_by_hand(decoder, queue, dtype, scale, wanted):
    """Codes 127 and -128; pytorch/ao #1766: 127 * 516 is too large for float16."""
    codes = to_device(np.resize(np.array([127, -128], "int8"), (1, 1, 1, 4)), queue)
    result = arrays.to_numpy(
        dequant_cache(codes, to_device(np.full((1, 1), scale, "f4"), queue), dtype=dtype)
    )
    with np.errstate(over="ignore"):
        wanted = np.array(wanted).astype(result.dtype)
    np.testing.assert_array_equal(np.signbit(result[0, 0, 0, :2]), np.signbit(wanted))
    np.testing.assert_array_equal(result[0, 0, 0, :2], wanted)


def test_a_fresh_cache_decodes_to_zero(queue):
    """llm-compressor #2117: also where the memory was dirty before."""
    shape = (64, 16, 4, 32)
    for _ in range(3):
        dirty = [to_device(np.full(np.prod(shape), -1, "int8"), queue) for _ in range(4)]
        del dirty
        kq, vq, ks, vs = empty_quant_cache(*shape, device=queue)
        for codes, scales in ((kq, ks), (vq, vs)):
            for dtype in VALUES:
                assert not arrays.to_numpy(dequant_cache(codes, scales, dtype=dtype)).view("u1").any()
        for array in (kq, vq, ks, vs):
            array[...] = 77


@pytest.mark.parametrize("by_block", [False, True])
def test_keys_and_values_in_one_call(queue, rng, by_block):
    """Scales by block take the index of their codes."""
    shape = (5, 4, 2, 16)
    caches = empty_quant_cache(*shape, scales_by_block=by_block, device=queue)
    assert caches[2].shape == caches[3].shape == (shape[:3] if by_block else (20, 2))
    rows = [loud * rng.standard_normal((20, 2, 16), dtype="float32") for loud in (1, 50)]
    slots = rng.permutation(20)
    reshape_and_cache_quant(*(to_device(row, queue) for row in rows), *caches, to_device(slots, queue))
    table = np.array([3, 0])
    found = dequant_caches(*caches, blocks=to_device(table, queue))
    kq, vq, ks, vs = map(arrays.to_numpy, caches)
    for values, codes, scales in zip(map(arrays.to_numpy, found), (kq, vq), (ks, vs)):
        scales = scales if by_block else scales.reshape(shape[:3])
        np.testing.assert_array_equal(values, (codes * scales[..., None])[table])


@pytest.mark.parametrize("residue", range(16))
def test_reused_blocks_hold_nothing_of_their_past(queue, rng, residue):
    """After two full lives of every block, a sequence reads as from a fresh cache, bit by bit.

    vllm #50702.
    """
    num_blocks, block_size, heads, size = 6, 16, 2, 32
    used = empty_quant_cache(num_blocks, block_size, heads, size, device=queue)
    length = 3 * block_size + residue
    for _ in range(2):
        full = quantize_case(rng, "float32", heads=heads, size=size, tokens=num_blocks * block_size)[:2]
        slots = to_device(rng.permutation(num_blocks * block_size), queue)
        reshape_and_cache_quant(*(to_device(row, queue) for row in full), *used, slots)
    key, value = (to_device(rows_of(rng, (length, heads, size), "float32"), queue) for _ in range(2))
    table = rng.permutation(num_blocks)[: -(-length // block_size)]
    fresh = empty_quant_cache(num_blocks, block_size, heads, size, device=queue)
    for start in range(0, length, 10):
        stop = min(start + 10, length)
        slots = to_device(np.array(slots_of_sequence(table, start, stop, block_size)), queue)
        for caches in (used, fresh):
            reshape_and_cache_quant(key[start:stop], value[start:stop], *caches, slots)
    blocks = to_device(table, queue)
    for part in (0, 1):
        decoded = [
            arrays.to_numpy(dequant_cache(caches[part], caches[2 + part], blocks=blocks)).reshape(
                -1, heads, size
            )[:length]
            for caches in (used, fresh)
        ]
        np.testing.assert_array_equal(decoded[0].view("u4"), decoded[1].view("u4"))


@pytest.mark.parametrize("dtype", VALUES)
def test_a_round_trip_stays_within_half_a_step(queue, rng, dtype):
    """Every element, the scale's own rounding and that of the product included."""
    rows = reference.as_float32(rows_of(rng, (160, 2, 64), dtype), dtype)
    rows = np.where(np.isfinite(rows), rows, 0)
    caches = empty_quant_cache(10, 16, 2, 64, device=queue)
    given = to_device(reference.from_float32(rows, dtype), queue)
    options = {"dtype": dtype} if dtype == "bfloat16" else {}
    reshape_and_cache_quant(given, given, *caches, to_device(np.arange(160), queue), **options)
    decoded = arrays.to_numpy(dequant_cache(caches[0], caches[2])).reshape(rows.shape)
    step = arrays.to_numpy(caches[2])[..., None].astype("f8")
    normal = step[..., 0] >= 2.0**-126
    error = np.abs(decoded.astype("f8") - rows)
    assert normal.sum() > 200
    assert (error <= step * (0.5 + 127 * 2.0**-23))[normal].all()


def test_beyond_2_to_the_31(decoder, queue, rng):
    """vllm #1486: the last block of a cache of more than 2**31 codes, by its number."""
    tensor = arrays.tensor_module()
    codes = tensor.empty((32769, 16, 32, 128), dtype="int8", sycl_queue=queue)
    scales = tensor.empty((32769 * 16, 32), dtype="float32", sycl_queue=queue)
    block = random_bits(rng, (1, 16, 32, 128), "int8")
    codes[32768] = to_device(block[0], queue)
    scales[32768 * 16 :] = to_device(np.full((16, 32), 0.5, "f4"), queue)
    result = dequant_cache(codes, scales, blocks=to_device(np.array([32768, 32769]), queue))
    np.testing.assert_array_equal(arrays.to_numpy(result), [block[0] * np.float32(0.5), 0 * block[0]])
