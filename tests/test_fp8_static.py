"""fp8 codes by scales that are given: the casts against torch's, whole caches against the reference."""

import numpy as np
import pytest

import kvcache_dpex as kv
from helpers import Twins, sentinel, to_device
from kvcache_dpex import reference
from kvcache_dpex.kernels.codecs import division, e4m3, e5m2
from kvcache_dpex.ops import cast
from kvcache_dpex.ops.operation import using
from kvcache_dpex.runtime.launch import arrays
from quantizing import VALUES, check_dequantize, option, rows_of
from test_int8_arithmetic import off_by

FORMATS = ["fp8_e4m3", "fp8_e5m2"]
CODECS = {"fp8_e4m3": e4m3, "fp8_e5m2": e5m2}
ONE = np.float32(1)


def numbers_of(format):
    """The finite numbers without a sign."""
    return reference.e4m3_values()[:127] if format == "fp8_e4m3" else reference.e5m2_values()[:124]


def oracle_of(format):
    return reference.to_e4m3 if format == "fp8_e4m3" else reference.to_e5m2


def ties(format):
    """Numbers halfway between two codes, their neighbours, and what saturates or vanishes."""
    numbers = numbers_of(format)
    halves = (numbers[1:] + numbers[:-1]) / np.float32(2)
    around = [np.nextafter(halves, np.float32(side)) for side in (-1, 1e9)]
    special = [numbers[-1] * 1.03, numbers[-1] * 1.2, 1e38, np.inf, np.nan, 2.0**-18, 1e-38, 0.0]
    found = np.concatenate([halves, *around, numbers, np.array(special, "f4")]).astype("f4")
    return np.concatenate([found, -found])


def torch_codes(values, format):
    """What torch's cast gives after a clamp; it does not saturate of itself."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    limit = float(numbers_of(format)[-1])
    dtype = torch.float8_e4m3fn if format == "fp8_e4m3" else torch.float8_e5m2
    return torch.from_numpy(values).clamp(-limit, limit).to(dtype).view(torch.uint8).numpy()


def assert_same_codes(found, wanted, values):
    """The sign of NaN is open; all else is equal."""
    found, wanted, nan = np.asarray(found), np.asarray(wanted), np.isnan(values)
    np.testing.assert_array_equal(found[~nan], wanted[~nan])
    assert ((found[nan] & 0x7F) == 0x7F).all()


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_torch(format, dtype):
    """Of all 65,536 float16 and bfloat16, and of float32 around every tie: the kernel's and the oracle's."""
    bits = np.arange(65536, dtype="u2")
    with np.errstate(all="ignore"):
        values = {
            "float32": ties(format),
            "float16": reference.as_float32(bits.view("f2")),
            "bfloat16": reference.as_float32(bits, "bfloat16"),
        }[dtype]
        wanted = torch_codes(values, format)
        assert_same_codes(oracle_of(format)(values), wanted, values)
        assert_same_codes(CODECS[format].codes_by(values, ONE), wanted, values)


def test_every_e5m2_code_means_what_torch_reads():
    codes = np.arange(256, dtype="u1")
    values = reference.from_e5m2(codes)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal([e5m2.value_of(code, ONE) for code in codes], values)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    read = torch.from_numpy(codes).view(torch.float8_e5m2).to(torch.float32).numpy()
    np.testing.assert_array_equal(values, read)


@pytest.mark.parametrize("units", [-3, 0, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_quotients_are_ieee_s(format, units, monkeypatch):
    """By scales of every size, with a division that is some units off; quotients lie beside ties."""
    monkeypatch.setattr(division, "divide", off_by(units))
    rng = np.random.default_rng(70)
    bits = np.array([0x00800000, 0x3FFFFFFF, 0x7EFFFFFF, *rng.integers(0x00800000, 0x7F000000, 100)], "i4")
    for scale in bits.view("f4"):
        with np.errstate(all="ignore"):
            values = (rng.choice(ties(format), 40) * scale).astype("f4")
            wanted = oracle_of(format)(values / scale)
            assert_same_codes(CODECS[format].codes_by(values, scale), wanted, values)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-39, 2.0**127, np.inf, np.nan])
@pytest.mark.parametrize("format", FORMATS)
def test_a_scale_that_is_none_gives_nan(format, scale):
    with np.errstate(all="ignore"):
        codes = CODECS[format].codes_by(np.array([1, 0, -3e38, np.inf], "f4"), np.float32(scale))
    assert [int(code) & 0x7F for code in codes] == [0x7F] * 4


def cast_case(rng, dtype, *, blocks=5, block_size=4, heads=3, size=16, value_size=None, tokens=6):
    """Rows, sentinel-filled codes, one scale for keys and one a head for values."""
    sizes = size, size if value_size is None else value_size
    scales = np.array([0.37], "f4"), rng.uniform(0.01, 9, heads).astype("f4")
    return (
        *(rows_of(rng, (tokens, heads, each), dtype) for each in sizes),
        *(sentinel((blocks, block_size, heads, each), "uint8") for each in sizes),
        *scales,
    )


def check_cast(queue, *host, dtype, format):
    """The package's write and the reference's leave the same bytes everywhere."""
    twins = Twins(queue)
    cast.reshape_and_cache_fp8(*map(twins.view, host), **option(dtype), format=format)
    with np.errstate(all="ignore"):
        reference.reshape_and_cache_fp8(*host, **option(dtype), format=format)
    for array in host[2:4]:
        found = twins.host(array)
        array[(array & 0x7F) == 0x7F] &= 0x7F  # the sign of NaN is open
        found[(found & 0x7F) == 0x7F] &= 0x7F
        np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(("size", "value_size"), [(128, 128), (46, 46), (5, 3)])
@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("runner", ["plain", "packaged"], indirect=True)
@pytest.mark.parametrize("kernel_name", ["cast_gpu", "cast_strided"])
def test_caches_of_the_reference(kernel_name, runner, queue, format, dtype, size, value_size):
    if runner == "plain" and size > 100:
        size = value_size = 16
    with using(variant=kernel_name):
        case = cast_case(np.random.default_rng(71), dtype, size=size, value_size=value_size)
        check_cast(queue, *case, np.array([7, -1, 0, 19, 8, 20]), dtype=dtype, format=format)


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("format", FORMATS)
def test_many_rows_of_any_strides(queue, format, dtype):
    """Heads first within a block, rows out of a buffer of queries, keys and values."""
    rng = np.random.default_rng(72)
    rows = rows_of(rng, (300, 3, 4, 48), dtype)
    codes = sentinel((2, 25, 4, 16, 48), "uint8").swapaxes(2, 3)
    scales = rng.uniform(0.1, 2, (2, 4)).astype("f4")
    slots = rng.permutation(400)[:300]
    check_cast(queue, rows[:, 1], rows[:, 2], *codes, *scales, slots, dtype=dtype, format=format)


@pytest.mark.parametrize("size", [128, 12, 5])
@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_code_is_decoded(queue, format, dtype, size):
    """Codes of any bits by one scale and by one a head; blocks that do not exist are zeros."""
    rng = np.random.default_rng(73)
    q = rng.integers(0, 256, (4, 4, 2, size), "u1")
    for scales in (np.array([0.3], "f4"), np.array([3e38, 1e-3], "f4"), np.array([np.inf], "f4")):
        for blocks in (None, np.array([3, -1, 0])):
            out = sentinel(
                (len(q if blocks is None else blocks), 4, 2, size), "uint16" if dtype == "bfloat16" else dtype
            )
            check_dequantize(queue, q, scales, out, blocks=blocks, **option(dtype), format=format)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"k_scale": np.ones(2, "f4")},
            ValueError,
            r"^`k_scale` must have shape \[1\] or .* = \[3\], got \[2\]$",
        ),
        ({"v_scale": np.ones(1, "f2")}, TypeError, r"^`v_scale` must be float32, got float16$"),
        (
            {"format": None},
            TypeError,
            r"^`key_cache` must be float8_e4m3fn, float8_e5m2, or uint8 with format=",
        ),
        ({"format": "fp8_per_token_head"}, ValueError, r"^`format` must be one of fp8_e4m3, fp8_e5m2, got"),
        (
            {"value_cache": np.zeros((5, 4, 3, 16), "i1")},
            TypeError,
            r"^`value_cache` must be float8_e4m3fn or",
        ),
    ],
)
def test_what_does_not_fit_is_refused(queue, changed, error, message):
    names = ("key", "value", "key_cache", "value_cache", "k_scale", "v_scale")
    given = dict(zip(names, cast_case(np.random.default_rng(74), "float32")), slot_mapping=np.array([0]))
    given = {**given, "format": "fp8_e4m3", **changed}
    on_device = {
        name: to_device(each, queue) if isinstance(each, np.ndarray) else each for name, each in given.items()
    }
    with pytest.raises(error, match=message):
        kv.reshape_and_cache_fp8(**on_device)
    for name in ("key_cache", "value_cache"):
        np.testing.assert_array_equal(arrays.to_numpy(on_device[name]), given[name])
