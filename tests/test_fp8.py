"""fp8_per_token_head: the codec against torch's cast, whole caches against the reference."""

import numpy as np
import pytest

import kvcache_dpex as kv
from helpers import sentinel, to_device
from kvcache_dpex import formats, reference
from kvcache_dpex.kernels.codecs import division, e4m3
from kvcache_dpex.kernels.intrinsics import abs_bits
from kvcache_dpex.runtime.launch import arrays
from quantizing import VALUES, check_dequantize, check_quantize, option, quantize_case, rows_of
from test_int8_arithmetic import off_by

FP8 = {"format": "fp8_per_token_head"}
FINITE = reference.e4m3_values()[:127]


def ties():
    """Every value halfway between two codes, its neighbours, and what saturates."""
    halves = (FINITE[1:] + FINITE[:-1]) / np.float32(2)
    around = [np.nextafter(halves, np.float32(side)) for side in (-1, 1000)]
    special = [0, 447.99, 448, 463.99, 464, 465, 1e30, np.inf, np.nan, 2.0**-10, 2.0**-11, 1e-45]
    found = np.concatenate([halves, *around, FINITE, np.array(special, "f4")]).astype("f4")
    return np.concatenate([found, -found])


def codes_of(values):
    with np.errstate(all="ignore"):
        return np.array([e4m3.code_of(value) for value in values], "u1")


def equal_but_for_nan(found, wanted):
    """Codes are the same; NaN has no sign."""
    nan = (wanted & 0x7F) == 0x7F
    return np.array_equal(found[~nan], wanted[~nan]) and ((found[nan] & 0x7F) == 0x7F).all()


def test_the_cast_rounds_ties_to_even():
    values = ties()
    assert equal_but_for_nan(codes_of(values), reference.to_e4m3(values))


def test_the_oracle_casts_as_torch_does():
    """All 65,536 float16 and bfloat16 values, and float32 around every tie; torch does not saturate."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    bits = np.arange(65536, dtype="u2")
    with np.errstate(all="ignore"):
        cases = [reference.as_float32(bits.view("f2")), reference.as_float32(bits, "bfloat16"), ties()]
    for values in cases:
        wanted = (
            torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        )
        assert equal_but_for_nan(reference.to_e4m3(values), wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_cast_of_every_bit_pattern(dtype):
    bits = np.arange(65536, dtype="u2")
    with np.errstate(all="ignore"):
        values = reference.as_float32(bits.view("f2") if dtype == "float16" else bits, dtype)
        assert equal_but_for_nan(codes_of(values), reference.to_e4m3(values))


def test_every_code_means_what_torch_reads():
    codes = np.arange(256, dtype="u1")
    values = reference.from_e4m3(codes).astype("f4")
    found = np.array([e4m3.value_of(code, np.float32(1)) for code in codes])
    np.testing.assert_array_equal(found, values)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    read = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    np.testing.assert_array_equal(values.view("u4")[:127], read.view("u4")[:127])
    np.testing.assert_array_equal(values, read)


@pytest.mark.parametrize("units", [-3, 0, 3])
def test_scales_and_quotients_are_ieee_s(units, monkeypatch):
    """From the least subnormal number to the largest, with a division that is some units off."""
    monkeypatch.setattr(division, "divide", off_by(units))
    rng = np.random.default_rng(60)
    edges = [1, 223, 224, 225, 448, 672, 0x007FFFFF, 0x00800000, e4m3.TINY - 1, e4m3.TINY, e4m3.TINY + 1]
    edges += [division.SMALL - 1, division.SMALL, 0x7F7FFFFF]
    bits = [*edges, *rng.integers(1, 0x7F800000, 200), *rng.integers(1, 2 * e4m3.TINY, 400)]
    # Scales that are halfway between two subnormal numbers: 224 more than a multiple of 448.
    bits += [448 * whole + 224 for whole in rng.integers(0, 2**20, 50)]
    for absmax in np.array(bits, "i4").view("f4"):
        with np.errstate(all="ignore"):
            scale = e4m3.scale_of(abs_bits(absmax))
            assert scale == absmax / np.float32(448), absmax
            values = (ties()[rng.integers(0, 700, 6)] * scale).astype("f4")
            values = np.clip(np.nan_to_num(values), -absmax, absmax)
            wanted = reference.to_e4m3(np.where(values == 0, 0, values / scale)) if scale else values * 0
            assert list(e4m3.codes_of(values, abs_bits(absmax), scale)) == list(
                np.abs(wanted) if not scale else wanted
            )


@pytest.mark.parametrize(("size", "value_size"), [(128, 128), (46, 46), (5, 3)])
@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("runner", ["plain", "packaged"], indirect=True)
def test_caches_of_the_reference(runner, kernel, queue, dtype, size, value_size):
    """Rows of every magnitude, of zeros, and with NaN or infinity, over a sentinel fill."""
    if runner == "plain" and size > 100:
        size = value_size = 16
    rng = np.random.default_rng(61)
    case = quantize_case(rng, dtype, size=size, value_size=value_size, heads=3, codes="uint8")
    check_quantize(queue, *case, np.array([7, -1, 0, 19, 8, 20]), **option(dtype), **FP8)


@pytest.mark.parametrize("dtype", VALUES)
def test_many_rows(kernel, queue, dtype):
    case = quantize_case(
        np.random.default_rng(62),
        dtype,
        blocks=50,
        block_size=16,
        heads=4,
        size=64,
        tokens=700,
        codes="uint8",
    )
    check_quantize(queue, *case, np.random.default_rng(63).permutation(800)[:700], **option(dtype), **FP8)


@pytest.mark.parametrize("size", [128, 96, 12, 5])
@pytest.mark.parametrize("dtype", VALUES)
def test_every_code_is_decoded(queue, dtype, size):
    """Codes of any bits, NaN among them, and scales of any bits; blocks that do not exist are zeros."""
    rng = np.random.default_rng(64)
    q = rng.integers(0, 256, (4, 4, 2, size), "u1")
    scales = rows_of(rng, (16, 2), "float32")
    out = sentinel((3, 4, 2, size), "uint16" if dtype == "bfloat16" else dtype)
    check_dequantize(queue, q, scales, out, blocks=np.array([3, -1, 0]), **option(dtype), **FP8)


def test_what_a_fresh_cache_holds():
    kq, vq, ks, vs = kv.empty_quant_cache(2, 4, 1, 8, **FP8)
    assert (kq.dtype.name, ks.dtype.name) == ("uint8", "float32")
    key = to_device(np.full((1, 1, 8), -3.5, "f4"), kq.sycl_queue)
    kv.reshape_and_cache_quant(key, key, kq, vq, ks, vs, to_device(np.array([5]), kq.sycl_queue), **FP8)
    decoded = arrays.to_numpy(kv.dequant_cache(vq, vs, **FP8))
    assert (decoded[1, 1] == -3.5).all()
    assert np.count_nonzero(decoded) == 8
    assert (arrays.to_numpy(kq)[1, 1] == 0xFE).all()


def test_the_format_must_fit_the_codes(queue):
    """A format is never guessed from uint8, and never contradicts the codes; nothing is written then."""
    case = quantize_case(np.random.default_rng(65), "float32", codes="uint8")
    views = [to_device(array, queue) for array in (*case, np.array([0]))]
    with pytest.raises(
        TypeError, match=r"^`kq` must be int8, float8_e4m3fn, or uint8 with format=.* got uint8$"
    ):
        kv.reshape_and_cache_quant(*views)
    with pytest.raises(TypeError, match=r"^`kq` must be int8 for format 'int8_per_token_head', got uint8$"):
        kv.reshape_and_cache_quant(*views, format="int8_per_token_head")
    with pytest.raises(TypeError, match=r"^`q` must be float8_e4m3fn or uint8 for format .*, got float32$"):
        kv.dequant_cache(views[0], views[4], **FP8)
    for call in (
        lambda: kv.dequant_cache(views[2], views[4], format="fp4"),
        lambda: formats.quantized("fp4"),
    ):
        with pytest.raises(
            ValueError, match=r"^`format` must be one of int8_per_token_head, fp8_.* got 'fp4'$"
        ):
            call()
    for view, before in zip(views, case):
        np.testing.assert_array_equal(arrays.to_numpy(view).view("u1"), before.view("u1"))


def test_tensors_of_float8(queue):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from kvcache_dpex import torch as kv_torch

    kq, vq, ks, vs = kv_torch.empty_quant_cache(2, 4, 2, 16, device="cpu", **FP8)
    assert kq.dtype == torch.float8_e4m3fn
    key = torch.randn(3, 2, 16)
    kv_torch.reshape_and_cache_quant(key, -key, kq, vq, ks, vs, torch.tensor([6, -1, 1]))
    host = reference.empty_quant_cache(2, 4, 2, 16, **FP8)
    reference.reshape_and_cache_quant(key.numpy(), -key.numpy(), *host, np.array([6, -1, 1]), **FP8)
    for found, wanted in zip((kq, vq), host):
        np.testing.assert_array_equal(found.view(torch.uint8).numpy(), wanted)
    decoded = kv_torch.dequant_cache(vq, vs).numpy()
    np.testing.assert_array_equal(decoded, reference.dequant_cache(host[1], host[3], **FP8))
