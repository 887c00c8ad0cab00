"""The int8 cache on torch tensors, against the oracle."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tensor_cases import BITS, as_bits, assert_same_memory, sentinel, twins  # noqa: E402

from kvcache_dpex import reference  # noqa: E402
from kvcache_dpex import torch as kv  # noqa: E402
from quantizing import rows_of  # noqa: E402

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SLOTS = torch.tensor([7, -1, 19, 0, 20, 3])


def as_tensor(array, name):
    return torch.from_numpy(array.view(f"i{array.itemsize}").copy()).view(DTYPES[name])


def values(tensor):
    """NumPy's array of the values, or of the bits where NumPy has no such dtype."""
    return as_bits(tensor).view("u2") if tensor.dtype == torch.bfloat16 else tensor.numpy()


def quant_case(name, *, size=16, axes=2):
    rng = np.random.default_rng(size)
    rows = [as_tensor(rows_of(rng, (6, 2, size), name), name) for _ in range(2)]
    scales = (20, 2) if axes == 2 else (5, 4, 2)
    return [
        *rows,
        *(sentinel((5, 4, 2, size), torch.int8) for _ in rows),
        *(sentinel(scales, torch.float32) for _ in rows),
    ]


def check_quantize(case, slots=SLOTS, run=kv.reshape_and_cache_quant):
    expected = twins(case)
    run(*case, slots)
    dtype = str(case[0].dtype).removeprefix("torch.")
    with np.errstate(all="ignore"):
        reference.reshape_and_cache_quant(*(values(t) for t in expected), slots.numpy(), dtype=dtype)
    assert_same_memory(case, expected)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [64, 5])
def test_quantize(name, size):
    check_quantize(quant_case(name, size=size))


def test_scales_by_block_and_strided_caches():
    key, value, *_ = quant_case("bfloat16")
    codes, scales = sentinel((5, 2, 4, 2, 16), torch.int8), sentinel((5, 2, 4, 2), torch.float32)
    check_quantize([key, value, codes[:, 0], codes[:, 1], scales[:, 0], scales[:, 1]])


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    key, value, *caches = quant_case("float16")
    check_quantize([key[:tokens], value[:tokens], *caches], SLOTS[:tokens])


def test_vllm_argument_order():
    def run(key, value, kq, vq, ks, vs, slots):
        kv.reshape_and_cache_flash(key, value, kq, vq, slots, "int8_per_token_head", ks, vs)

    check_quantize(quant_case("bfloat16", axes=3), run=run)
    check_quantize(
        quant_case("bfloat16", axes=3),
        run=lambda key, value, kq, vq, ks, vs, slots: torch.ops.kvcache_dpex.reshape_and_cache_flash(
            key, value, kq, vq, slots, "int8_per_token_head", ks, vs
        ),
    )


def test_vllms_name_of_the_fp8_format():
    key, value, *_ = quant_case("bfloat16")
    found, wanted = (
        kv.empty_quant_cache(5, 4, 2, 16, format="fp8_per_token_head", device="cpu") for _ in range(2)
    )
    kq, vq, ks, vs = found
    kv.reshape_and_cache_flash(key, value, kq, vq, SLOTS, "fp8_per_token_head", ks, vs)
    kv.reshape_and_cache_quant(key, value, *wanted, SLOTS)
    assert ks.any()
    for ours, theirs in zip(found, wanted):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("blocks", [None, [[3, -1], [0, 9]]], ids=["all blocks", "some blocks"])
def test_dequantize(name, blocks):
    case = quant_case("float32")
    kv.reshape_and_cache_quant(*case, SLOTS)
    q, scales = case[2], case[4]
    chosen = None if blocks is None else torch.tensor(blocks)
    with np.errstate(all="ignore"):
        expected = reference.dequant_cache(q.numpy(), scales.numpy(), dtype=name, blocks=blocks)
    found = kv.dequant_cache(q, scales, dtype=DTYPES[name], blocks=chosen)
    assert found.dtype == DTYPES[name]
    np.testing.assert_array_equal(values(found), expected)
    out = sentinel(found.shape, DTYPES[name])
    assert kv.dequant_cache(q, scales, out=out, blocks=chosen) is out
    assert torch.equal(out.view(BITS[out.itemsize]), found.view(BITS[out.itemsize]))


def test_dequantize_gives_float32_by_default():
    kq, _, ks, _ = kv.empty_quant_cache(5, 4, 2, 16, device="cpu")
    found = kv.dequant_cache(kq, ks)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.zeros(5, 4, 2, 16))
    assert kv.dequant_cache(kq, ks, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(("device", "expected"), [(None, "xpu"), ("cpu", "cpu")])
def test_all_caches_are_on_one_device(monkeypatch, device, expected):
    """On a machine whose torch has an XPU."""
    made = []

    def zeros(shape, dtype, device):
        made.append(torch.device(device).type)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", zeros)
    kv.empty_quant_cache(2, 4, 1, 8, device=device)
    assert made == [expected] * 4
    kv.empty_cache(2, 4, 1, 8, device=device)
    assert made == [expected] * 6


def test_scales_by_block_and_both_caches_decoded():
    caches = kv.empty_quant_cache(5, 4, 2, 16, scales_by_block=True, device="cpu")
    key, value = torch.randn(2, 6, 2, 16)
    kv.reshape_and_cache_quant(key, 9 * value, *caches, torch.tensor([3, 0, 19, 7, 8, 11]))
    kq, vq, ks, vs = caches
    keys, values = kv.dequant_caches(*caches)
    assert torch.equal(keys, kq * ks[..., None])
    assert torch.equal(values, vq * vs[..., None])
