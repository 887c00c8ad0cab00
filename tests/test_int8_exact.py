"""Codes and scales, bit for bit: millions of random values of each dtype, and every row that is special."""

import functools

import numpy as np
import pytest

from helpers import random_bits, sentinel, to_device
from kvcache_dpex import dequant_cache, reference, reshape_and_cache_quant
from kvcache_dpex.kernels.codecs.division import inverse_of, quotient_of
from kvcache_dpex.kernels.intrinsics import abs_bits, divide, float_from_bits
from kvcache_dpex.runtime.compile import compiler, store
from kvcache_dpex.runtime.launch import arrays, launch
from quantizing import EXPONENTS, VALUES, option, quantize_rows, stored

BITS = {"float32": "uint32", "float16": "uint16", "bfloat16": "uint16"}
LARGEST = {"float32": 3.4028235e38, "float16": 65504.0, "bfloat16": 3.3895314e38}


def assert_exact(queue, rows, dtype):
    """Rows of `dtype`, [count, size] with an even count: half of them are keys, half values."""
    count, size = rows.shape[0] // 2, rows.shape[1]
    blocks = -(-count // 16)
    halves = [to_device(half.reshape(count, 1, size), queue) for half in (rows[:count], rows[count:])]
    codes = [to_device(sentinel((blocks, 16, 1, size), "int8"), queue) for _ in halves]
    scales = [to_device(sentinel((blocks * 16, 1), "float32"), queue) for _ in halves]
    slots = to_device(np.arange(count), queue)
    reshape_and_cache_quant(*halves, *codes, *scales, slots, **option(dtype))
    wanted = quantize_rows(reference.as_float32(rows, dtype))
    for found, right in zip((codes, scales), wanted):
        found = [arrays.to_numpy(each).reshape(blocks * 16, -1)[:count] for each in found]
        right = right.reshape(2, count, -1)
        for half in (0, 1):
            np.testing.assert_array_equal(found[half].view("u1"), right[half].view("u1"))


def pairs(rows, size):
    """float32 rows as [even count, size], with zeros at the end of short rows."""
    padded = np.zeros((len(rows) + len(rows) % 2, size), "f4")
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def magnitudes(rng, dtype, count):
    low, high = EXPONENTS[dtype]
    return np.exp2(rng.uniform(low, high + 0.9, (count, 1)))


@functools.cache
def usual_values(dtype):
    """3.5 million values, rows of every magnitude."""
    rng = np.random.default_rng(60)
    rows = rng.uniform(-1, 1, (54688, 64)) * magnitudes(rng, dtype, 54688)
    return stored(np.clip(rows, -LARGEST[dtype], LARGEST[dtype]), dtype)


@functools.cache
def any_bits(dtype):
    """3.5 million patterns of bits, NaN and infinity in many rows."""
    return random_bits(np.random.default_rng(61), (218750, 16), stored(0, dtype).dtype)


@functools.cache
def beside_ties(dtype):
    """3.5 million values as near to ties of their rows as the dtype allows, and up to two units away."""
    rng = np.random.default_rng(62)
    count = 54688
    largest = reference.as_float32(stored(magnitudes(rng, dtype, count), dtype), dtype)
    largest = np.minimum(largest, np.float32(LARGEST[dtype]))
    ties = (rng.integers(-127, 127, (count, 64)) + 0.5) * (largest / np.float32(127)).astype("f8")
    bits = stored(ties, dtype).view(BITS[dtype])
    bits += rng.integers(-2, 3, bits.shape).astype(bits.dtype)
    near = reference.as_float32(bits.view(stored(0, dtype).dtype), dtype)
    near = np.where(np.abs(near) < largest, near, largest)
    near[:, 17] = largest[:, 0]
    return stored(near, dtype)


@pytest.mark.parametrize("make", [usual_values, any_bits, beside_ties])
@pytest.mark.parametrize("dtype", VALUES)
def test_ten_million_values(kernel, queue, dtype, make):
    """intel/llvm #12107: of each dtype, through each kernel."""
    assert usual_values(dtype).size + any_bits(dtype).size + beside_ties(dtype).size > 10_000_000
    assert_exact(queue, make(dtype), dtype)


def test_quantize_rows_is_the_reference():
    rng = np.random.default_rng(63)
    rows = np.concatenate([any_bits("float32")[:500], usual_values("float32")[:500, :16]])
    rows[::50] = rng.choice(np.array([0, -0.0, 1e-44, np.inf, np.nan, LARGEST["float32"]], "f4"), (20, 16))
    codes, scales = quantize_rows(rows)
    with np.errstate(all="ignore"):
        for row, code, scale in zip(rows, codes, scales):
            right_code, right_scale = reference.quantize_row(row)
            np.testing.assert_array_equal(code, right_code)
            assert scale.view("u4") == right_scale.view("u4")


def tie_rows(dtype):
    """All ties of every scale that is a power of two, as far as the dtype has them."""
    row = np.array([*(np.arange(-127, 127) + 0.5), 127.0])
    low, high = EXPONENTS[dtype]
    with np.errstate(over="ignore", under="ignore"):
        rows = row * np.exp2(np.arange(low, high - 5.0))[:, None]
    whole = reference.as_float32(stored(rows, dtype), dtype)
    return whole[(whole == rows).all(-1)]


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("dtype", VALUES)
def test_all_ties_and_their_neighbours(kernel, queue, dtype, step):
    """Ties go to the even code; values one unit away from a tie do not.

    vllm #45361, vllm #41505, intel/llvm #12107.
    """
    rows = tie_rows(dtype)
    assert len(rows) > 250 if dtype != "float16" else len(rows) == 33
    bits = stored(rows, dtype).view(BITS[dtype])
    bits[:, :-1] += np.array(step).astype(bits.dtype)
    moved = reference.as_float32(bits.view(stored(0, dtype).dtype), dtype)
    assert_exact(queue, stored(pairs(moved, 256), dtype), dtype)
    if step == 0:
        codes, scales = quantize_rows(rows)
        assert (np.log2(scales) % 1 == 0).all()
        assert (codes == np.rint(np.array([*(np.arange(-127, 127) + 0.5), 127]))).all()


def special_rows(dtype, rng):
    """Rows at the ends of what numbers can be."""
    largest = np.float32(LARGEST[dtype])
    least = np.float32(2.0 ** EXPONENTS[dtype][0])
    unit = np.linspace(-1, 1, 255)
    # From 127 * 2**-128 down the reciprocal of the scale is infinite in float32; then scales are subnormal.
    for power in np.arange(-128.0, -112.0, 0.25):
        yield unit * 127 * np.exp2(power)
        yield unit * 127 * np.exp2(power) * rng.uniform(0.5, 1)
    for multiple in range(1, 300):
        yield np.rint(unit * multiple) * least
        yield np.array([multiple, *rng.integers(-multiple, multiple + 1, 30)]) * least
    yield from (largest * unit, np.full(256, largest), np.full(256, -largest), [largest], [0, -largest])
    yield from (np.zeros(256), np.full(256, -0.0), [0.0, -0.0], [1.0], [-1.0], [least], [-least])
    for fault in (np.nan, np.inf, -np.inf):
        for place in (0, 1, 100, 255):
            row = np.linspace(1, 2, 256)
            row[place] = fault
            yield row
            yield np.full(256, 3.0)
    yield [np.nan, np.inf, -np.inf]
    yield [largest, np.inf]


@pytest.mark.parametrize("dtype", VALUES)
def test_special_rows(kernel, queue, dtype):
    """Reciprocals that overflow, scales that are subnormal, zeros, NaN, infinity.

    kernels-community #680, pytorch/ao #1766, pytorch/ao #4725.
    """
    rows = pairs(list(special_rows(dtype, np.random.default_rng(64))), 256)
    assert_exact(queue, stored(rows, dtype), dtype)


@pytest.mark.parametrize("size", [1, 3, 16, 46, 128, 512, 1025])
@pytest.mark.parametrize("dtype", VALUES)
def test_the_largest_value_may_stand_anywhere(kernel, queue, dtype, size):
    """LightLLM #943: each place in turn, of either sign; NaN and infinity are found there too."""
    rows = np.tile(np.linspace(-1, 1, size), (4 * size, 1))
    rows[np.arange(4 * size), np.arange(4 * size) % size] = np.repeat([1.5, -1.75, np.nan, -np.inf], size)
    assert_exact(queue, stored(rows, dtype), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_element_rows_of_every_bit_pattern(queue, dtype):
    assert_exact(queue, np.arange(65536, dtype="u2").view(stored(0, dtype).dtype)[:, None], dtype)


def test_the_scale_of_every_mantissa(queue):
    """All 2**23 of them in one binade; other binades differ by an exact power of two."""
    for start in range(0x3F800000, 0x40000000, 2**20):
        rows = np.arange(start, start + 2**20, dtype="u4").view("f4")[:, None]
        assert_exact(queue, rows, "float32")


@pytest.mark.parametrize(
    ("dtype", "row", "codes", "scale"),
    [
        (
            "float32",
            [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, 126.5, -126.5],
            [127, 0, 2, 2, 0, -2, -2, 64, 126, -126],
            0x3F800000,
        ),
        ("float32", [-4, 1, 0.52, 2.2], [-127, 32, 17, 70], 0x3D010204),
        ("float32", [-4, -1, -0.52, -2.2], [-127, -32, -17, -70], 0x3D010204),
        ("float32", [-1], [-127], 0x3C010204),
        ("float16", [2.0**-24, 0, -(2.0**-24), 0], [127, 0, -127, 0], 0x30010204),
        ("float16", [65504, -32000, 100, 0], [127, -62, 0, 0], 0x4400F1E4),
        ("float32", [2.0**-149, -(2.0**-149)], [0, 0], 0),
        ("float32", [64 * 2.0**-149, 63 * 2.0**-149], [64, 63], 1),
        ("float32", [63 * 2.0**-149, 2.0**-149], [0, 0], 0),
        ("float32", [3.4028235e38, -3.4028235e38], [127, -127], 0x7C010204),
        ("bfloat16", [1, np.nan, -1, 0.5], [0, 0, 0, 0], 0x7FC00000),
        ("float16", [1, -np.inf], [0, 0], 0x7F800000),
    ],
)
def test_by_hand(kernel, queue, dtype, row, codes, scale):
    """Rows of public reports, with codes and scales from there or worked out.

    vllm #45361, LightLLM #943, pytorch/ao #1766, pytorch/ao #4725.
    """
    rows = stored(np.array([row]), dtype)[:, None]
    found = [to_device(sentinel((1, 2, 1, len(row)), "int8"), queue) for _ in range(2)]
    scales = [to_device(sentinel((2, 1), "float32"), queue) for _ in range(2)]
    key, slots = to_device(rows, queue), to_device(np.array([1]), queue)
    reshape_and_cache_quant(key, key, *found, *scales, slots, **option(dtype))
    for each, its_scale in zip(found, scales):
        assert arrays.to_numpy(each)[0, 1, 0].tolist() == codes
        assert arrays.to_numpy(its_scale).view("u4")[1, 0] == scale
    if scale == 0x4400F1E4:
        assert float(arrays.to_numpy(dequant_cache(found[0], scales[0]))[0, 1, 0, 0]) == 65504.0


def count_wrong(item: "item[1]", wrong: "int32*"):  # noqa: F722, F821
    """How many quotients beside ties are not what the device divides, for one divisor from 1 to 2."""
    divisor = float_from_bits(np.int32(0x3F800000 + item.get_id(0)))
    inverse = inverse_of(np.int32(0x43000000), divisor)
    found = np.int32(0)
    for whole in range(127):
        tie = abs_bits((np.float32(whole) + np.float32(0.5)) * divisor)
        for units in range(-2, 3):
            value = float_from_bits(np.int32(tie + units))
            if quotient_of(value, divisor, inverse) != divide(value, divisor):
                found = np.int32(found + 1)
    wrong[item.get_id(0)] = found


@pytest.mark.skipif(not compiler.available(), reason="compiles a kernel of its own, with numba-dpex")
def test_quotients_beside_every_tie(queue):
    """Every tie of a code with all 2**23 divisors from 1 to 2: one correction is enough.

    intel/llvm #12107.
    """
    if not queue.sycl_device.is_cpu:
        pytest.skip(f"{queue.sycl_device.name} may divide too roughly to be compared with")
    wrong = to_device(sentinel(2**23, "int32"), queue)
    run = launch.Launch(store.load(count_wrong), queue, (), (2**23,), (4096,))
    run((arrays.read(wrong, "wrong")[0],), (wrong,))
    assert not arrays.to_numpy(wrong).any()
