"""Layouts of codes and scales that engines use, taken as views: scales inline, and scales that are static."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvcache_dpex import torch as kv  # noqa: E402

NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE = 4, 4, 2, 32
SLOTS = torch.tensor([3, -1, 7, 15, 0])
BLOCK_TABLE = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
SEQ_LENS = torch.tensor([6, 8], dtype=torch.int32)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}


def inline_views(buffer, dtype):
    """The four arrays in rows ``[K codes | float32 | V codes | float32]`` of an NHD view of bytes."""
    words = buffer.view(torch.float32)
    keys, values = buffer[..., :SIZE], buffer[..., SIZE + 4 : 2 * SIZE + 4]
    return keys.view(dtype), values.view(dtype), words[..., SIZE // 4], words[..., (2 * SIZE + 4) // 4]


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(NUM_BLOCKS, BLOCK_SIZE, HEADS, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("format", CODES)
def test_scales_inline(format, order, dtype):
    row = 2 * (SIZE + 4)
    shape = (BLOCK_SIZE, HEADS) if order == "NHD" else (HEADS, BLOCK_SIZE)
    buffer = torch.full((NUM_BLOCKS, *shape, row), 0x5A, dtype=torch.uint8)
    tokens = buffer if order == "NHD" else buffer.transpose(1, 2)
    kq, vq, ks, vs = inline_views(tokens, CODES[format])
    apart = [each.contiguous() for each in (kq, vq, ks, vs)]
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, len(SLOTS), HEADS, SIZE, generator=generator).to(dtype)
    kv.reshape_and_cache_quant(key, value, *apart, SLOTS)
    kv.reshape_and_cache_quant(key, value, kq, vq, ks, vs, SLOTS)
    kq_apart, vq_apart, ks_apart, vs_apart = map(as_bytes, apart)
    assert torch.equal(tokens, torch.cat([kq_apart, ks_apart, vq_apart, vs_apart], dim=-1))
    for blocks in (None, torch.tensor([2, -1, 0])):
        found = kv.dequant_cache(vq, vs, dtype=dtype, blocks=blocks)
        assert torch.equal(found, kv.dequant_cache(apart[1], apart[3], dtype=dtype, blocks=blocks))
    query = torch.randn(2, 2 * HEADS, SIZE, generator=generator)
    found, expected = (
        kv.paged_attention(query, k, v, BLOCK_TABLE, SEQ_LENS, key_scales=k_scales, value_scales=v_scales)
        for k, v, k_scales, v_scales in ((kq, vq, ks, vs), apart)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scales", [[0.3], [0.3, 0.07]], ids=["one scale", "one a head"])
def test_static_scales_are_read(scales):
    generator = torch.Generator().manual_seed(0)
    values = 9 * torch.randn(NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE, generator=generator)
    scale = torch.tensor(scales)
    codes = (values / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    decoded = codes.float() * scale[:, None]
    by_slot = scale.expand(NUM_BLOCKS * BLOCK_SIZE, HEADS)
    for dtype in DTYPES:
        assert torch.equal(kv.dequant_cache(codes, by_slot, dtype=dtype), decoded.to(dtype))
    query = torch.randn(2, 2 * HEADS, SIZE, generator=generator)
    keywords = {"key_scales": by_slot, "value_scales": by_slot}
    found = kv.paged_attention(query, codes, codes, BLOCK_TABLE, SEQ_LENS, **keywords)
    expected = kv.paged_attention(query, decoded, decoded, BLOCK_TABLE, SEQ_LENS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
