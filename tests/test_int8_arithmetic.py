"""The int8 arithmetic in plain Python, with the division that a sloppy device has."""

from fractions import Fraction

import numpy as np
import pytest

from kvcache_dpex import reference
from kvcache_dpex.kernels import intrinsics, views
from kvcache_dpex.kernels.codecs import division, int8
from kvcache_dpex.runtime.compile import parameters
from kvcache_dpex.runtime.compile.memory import Pointer, View
from quantizing import check_quantize, quantize_case

FLOAT32_MAX = np.finfo("f4").max


def nearest(fraction):
    """The float32 nearest to a fraction, ties to even: its definition, slowly."""
    with np.errstate(over="ignore"):
        guess = np.float32(float(fraction))
    guess = np.clip(guess, -FLOAT32_MAX, FLOAT32_MAX)

    def distance(candidate):
        exact = Fraction(float(candidate)) if np.isfinite(candidate) else Fraction(2**128)
        return abs(fraction - (exact if candidate > 0 else -abs(exact))), int(candidate.view("i4")) & 1

    with np.errstate(over="ignore"):
        candidates = [
            guess,
            np.nextafter(guess, np.float32(np.inf)),
            np.nextafter(guess, np.float32(-np.inf)),
        ]
    return min(candidates, key=distance)


def triples(rng):
    """Operands of an fma: of every size, cancelling, and a hair beside a tie."""
    for _ in range(1500):
        x, y, z = (rng.standard_normal(3) * np.exp2(rng.integers(-70, 60, 3))).astype("f4")
        yield x, y, z
        yield x, y, -np.float32(x * y)  # leaves the rounding error of the product alone
        yield x, y, np.float32(x * y) * np.float32(2.0 ** rng.integers(-30, 30))
    # Products of 2**46 - 1 and 2**46 + 1: less and more than half a unit of z, as no float64 sum can tell.
    for power in (-60, -23, 0, 50, 100):
        for x, y in ((2**23 - 1, 2**23 + 1), (8384513, 8392705)):
            x, y = np.float32(x * 2.0**-35), np.float32(y * 2.0 ** (power - 35))
            for z in np.array([0x3F800000, 0x3F800001, 0x3FFFFFFF], "i4").view("f4"):
                yield x, y, z * np.float32(2.0**power)
                yield -x, y, z * np.float32(-(2.0**power))
    for bits in rng.integers(0, 0x01000000, (300, 3)):
        x, y, z = bits.astype("u4").view("f4")
        yield x, np.float32(1.5), z
        yield x, np.float32(2.0**-20), z
        yield np.float32(x * np.float32(2.0**100)), np.float32(y * np.float32(2.0**100)), -z
    yield FLOAT32_MAX, np.float32(1), np.float32(2.0**103)
    yield FLOAT32_MAX, np.float32(1), np.nextafter(np.float32(2.0**103), np.float32(0))


def test_fma_rounds_once():
    with np.errstate(all="ignore"):
        cases = list(triples(np.random.default_rng(50)))
    twice = 0
    for x, y, z in cases:
        wanted = nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        found = intrinsics.fma(x, y, z)
        assert type(found) is np.float32
        assert found == wanted, (x, y, z)
        with np.errstate(over="ignore"):
            twice += np.float32(float(x) * float(y) + float(z)) != wanted
    assert twice > 10  # a float64 sum, rounded a second time, would not do


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((np.inf, 1, 1), np.inf),
        ((1, 1, -np.inf), -np.inf),
        ((np.inf, 0, 1), np.nan),
        ((1, np.nan, 1), np.nan),
        ((np.inf, 1, -np.inf), np.nan),
    ],
)
def test_fma_without_a_number(arguments, wanted):
    np.testing.assert_equal(intrinsics.fma(*np.array(arguments, "f4")), np.float32(wanted))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_loads_and_stores_of_every_bit_pattern(dtype):
    """Each value comes back, NaN as NaN; halves of units in the last place round to even."""
    bits = np.arange(65536, dtype="u2")
    memory = bits.view("f2" if dtype == "float16" else "i2")
    view = View(parameters.parse(f"{dtype}[element=1]"), Pointer(memory), [])
    values = np.array([views.load(view, index) for index in range(0, 65536, 7)])
    wanted = reference.as_float32(bits if dtype == "bfloat16" else memory, dtype)[::7]
    np.testing.assert_array_equal(values, wanted)
    between = [np.nextafter(value * np.float32(1 + 2.0**-9), np.float32(0)) for value in values[:3000]]
    between += [value * np.float32(1 + odd * 2.0**-12) for value in values[:2000] for odd in (1, 2, 3)]
    between = np.array([*between, FLOAT32_MAX, 65519.99, 65520, np.inf, -np.inf, np.nan], "f4")
    out = np.zeros(len(between), memory.dtype)
    view = View(parameters.parse(f"{dtype}[element=1]"), Pointer(out), [])
    with np.errstate(over="ignore"):
        for index, value in enumerate(between):
            views.store(view, value, index)
    np.testing.assert_array_equal(out.view("u2"), reference.from_float32(between, dtype).view("u2"))


def test_codes_are_whole_and_fit():
    """What a device would cut off is an error in Python."""
    for value in (128, -129, 2**22):
        with pytest.raises(ValueError, match="does not fit in int8"):
            intrinsics.to_int8(np.int32(value))
    codes = np.array([1, -2, 127, -127], "i4")
    assert [intrinsics.to_int8(each) for each in codes] == codes.tolist()
    assert [intrinsics.float_from_int8(np.int8(each)) for each in codes] == codes.tolist()


def test_nearest_whole_numbers():
    """Ties to even; what has none is some number, which rows that are not finite never show."""
    halves = np.arange(-300, 300).astype("f4") / np.float32(2)
    around = [halves, np.nextafter(halves, np.float32(999)), np.nextafter(halves, np.float32(-999))]
    for x in np.concatenate(around):
        found = intrinsics.rint_i32(x)
        assert (type(found), found) == (np.int32, np.rint(x))
    for value in (np.nan, np.inf, -np.inf, 1e30):
        assert type(intrinsics.rint_i32(np.float32(value))) is np.int32


def off_by(units):
    """A division whose every result is some units in the last place away from the right one."""

    def divide(x, y):
        with np.errstate(all="ignore"):
            return (np.float32(x) / np.float32(y)).view("i4").__add__(np.int32(units)).view("f4")

    return divide


@pytest.fixture(params=range(-3, 4))
def sloppy(request, monkeypatch):
    """OpenCL allows 2.5 units in the last place."""
    monkeypatch.setattr(division, "divide", off_by(request.param))


def absmaxes(rng):
    """Largest magnitudes of rows, from the least subnormal number to the largest; the hardest last."""
    edges = [
        1,
        2,
        63,
        64,
        127,
        0x007FFFFF,
        0x00800000,
        int8.TINY - 1,
        int8.TINY,
        division.SMALL - 1,
        division.SMALL,
    ]
    bits = [*edges, 0x7F7FFFFF, *rng.integers(1, 0x7F800000, 300), *rng.integers(1, int8.TINY, 50)]
    return [*np.array(bits, "i4").view("f4"), *all_ones(rng)]


def all_ones(rng):
    """Magnitudes whose scale has a mantissa of ones, where Newton's steps may stay half a unit off."""
    exponents = rng.choice(np.arange(1, 247), 60, replace=False).astype("i4")
    scales = ((exponents << 23) | 0x7FFFFF).view("f4")
    around = (scales.astype("f8") * 127).astype("f4").view("i4")[:, None] + np.arange(-2, 3, dtype="i4")
    found = around.view("f4")
    found = found[((found / np.float32(127)).view("u4") & 0x7FFFFF) == 0x7FFFFF]
    assert found.size >= 60
    return found


def near_ties(rng, scale, absmax, count):
    """Values of a row that lie on a tie, or up to two units in the last place beside one."""
    whole = rng.integers(-127, 127, count)
    values = ((whole + 0.5) * scale.astype("f8")).astype("f4")
    values = (values.view("i4") + rng.integers(-2, 3, count, dtype="i4")).view("f4")
    return np.clip(values, -absmax, absmax)


def test_codes_and_scales_on_a_sloppy_device(sloppy):
    """intel/llvm #12107: IEEE quotients whatever the device's division gives."""
    rng = np.random.default_rng(51)
    for absmax in absmaxes(rng):
        bits = intrinsics.abs_bits(-absmax)
        scale = int8.scale_of(bits)
        assert scale == absmax / np.float32(127)
        for x in [absmax, -absmax, np.float32(0), *near_ties(rng, scale, absmax, 10)]:
            wanted = np.clip(np.rint(x / scale), -127, 127) if scale else 0
            assert int8.codes_of((x,), bits, scale) == (wanted,), (x, absmax)


def fma_of_arrays(x, y, z):
    """`intrinsics.fma` of whole arrays, for numbers of middling size."""
    product = np.multiply(x, y, dtype="f8")
    total = product + z
    other = total - product
    error = (product - (total - other)) + (z - other)
    even = (error != 0) & (total.view("i8") & 1 == 0)
    total[even] = np.nextafter(total[even], np.copysign(np.inf, error[even]))
    return total.astype("f4")


@pytest.mark.parametrize("units", [-3, 3])
def test_the_inverse_of_every_mantissa(monkeypatch, units):
    """All 2**23 of them; those of ones only, which `inverse_of` knows, are not reached."""
    monkeypatch.setattr(division, "fma", fma_of_arrays)
    for start in range(0x3F800000, 0x40000000, 2**20):
        divisors = np.arange(start, start + 2**20, dtype="i4").view("f4")
        right = np.float32(1) / divisors
        found = (right.view("i4") + np.int32(units)).view("f4")
        for _ in range(2):
            found = division.nearer_inverse(divisors, found)
        wrong = divisors[found != right]
        assert set(wrong.view("u4")) <= {0x3FFFFFFF}


def test_quotients_near_ties(monkeypatch):
    """2**21 rows' scales, each with a value that lies on a tie or beside one."""
    rng = np.random.default_rng(54)
    cases = np.array([next(triples(rng)) for _ in range(300)])
    np.testing.assert_array_equal(fma_of_arrays(*cases.T), [intrinsics.fma(*case) for case in cases])
    monkeypatch.setattr(division, "fma", fma_of_arrays)
    divisors = (rng.integers(0, 2**23, 2**21) + 0x3F800000).astype("i4").view("f4")
    ties = ((rng.integers(0, 127, divisors.size) + 0.5) * divisors.astype("f8")).astype("f4")
    values = (ties.view("i4") + rng.integers(-2, 3, ties.size, dtype="i4")).view("f4")
    found = division.quotient_of(values, divisors, np.float32(1) / divisors)
    np.testing.assert_array_equal(found, values / divisors)


def test_the_hardest_divisors(monkeypatch):
    """Every tie of some rows; each of the sloppy divisions leads to the same inverse, the right one."""
    rng = np.random.default_rng(52)
    chosen = [*all_ones(rng)[:6], *np.exp2(rng.uniform(-148, 127, 6)).astype("f4")]
    for absmax in chosen:
        bits = intrinsics.abs_bits(absmax)
        scale = int8.scale_of(bits)
        divisor = division.divisor_of(bits, scale)
        inverses = set()
        for units in range(-3, 4):
            monkeypatch.setattr(division, "divide", off_by(units))
            inverses.add(division.inverse_of(bits, divisor))
        assert inverses == {np.float32(1) / divisor}
        ties = ((np.arange(-127, 127) + 0.5) * scale.astype("f8")).astype("f4")
        for step in (-1, 0, 1):
            for x in np.clip((ties.view("i4") + np.int32(step)).view("f4"), -absmax, absmax):
                wanted = np.clip(np.rint(x / scale), -127, 127)
                assert int8.codes_of((x,), bits, scale) == (wanted,), (x, absmax)


def test_scales_of_rows_without_a_number():
    for value in (np.inf, np.nan):
        bits = intrinsics.abs_bits(np.float32(-value))
        scale = int8.scale_of(bits)
        np.testing.assert_equal(scale, np.float32(value))
        assert division.inverse_of(bits, scale) == 0
    assert intrinsics.abs_bits(np.float32(np.nan)) > intrinsics.abs_bits(np.float32(np.inf))
    assert intrinsics.abs_bits(np.float32(np.inf)) > intrinsics.abs_bits(FLOAT32_MAX)
    assert intrinsics.abs_bits(np.float32(-0.0)) == 0


@pytest.mark.parametrize("runner", ["plain"], indirect=True)
def test_kernels_on_a_sloppy_device(runner, kernel, sloppy, queue):
    rng = np.random.default_rng(53)
    check_quantize(queue, *quantize_case(rng, "float32", tokens=5), np.array([3, 1, 19, 4, 0]))
