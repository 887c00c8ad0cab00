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
    shape = NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE
    made = kv.empty_quant_cache(*shape, format=format, inline=order, device="cpu")
    for view, wanted in zip(made, (kq, vq, ks, vs)):
        assert (view.shape, view.stride(), view.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert view.storage_offset() == wanted.storage_offset()
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


LARGEST = {torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344}


@pytest.mark.parametrize("scales", [[0.3], [0.3, 0.07]], ids=["one scale", "one a head"])
@pytest.mark.parametrize("codes", LARGEST, ids=str)
def test_static_scales(codes, scales):
    """Rows are cast as torch casts them, decoded and attended to, by one scale and by one a head."""
    generator = torch.Generator().manual_seed(0)
    scale, slots = torch.tensor(scales), torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)
    query = torch.randn(2, 2 * HEADS, SIZE, generator=generator)
    for dtype in DTYPES:
        rows = (9 * torch.randn(NUM_BLOCKS * BLOCK_SIZE, HEADS, SIZE, generator=generator)).to(dtype)
        caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE, dtype=codes) for _ in range(2)]
        kv.reshape_and_cache_fp8(rows, -rows, *caches, scale, scale, slots)
        wanted = (rows.float() / scale[:, None]).clamp(-LARGEST[codes], LARGEST[codes]).to(codes)
        for cache, sign in zip(caches, (1, -1)):
            found = cache.flatten(0, 1)[slots].float()
            assert torch.equal(found, sign * wanted.float())
        decoded = [cache.float() * scale[:, None] for cache in caches]
        for given in (scale, scale.expand(NUM_BLOCKS * BLOCK_SIZE, HEADS)):
            assert torch.equal(kv.dequant_cache(caches[0], given, dtype=dtype), decoded[0].to(dtype))
        keywords = {"key_scales": scale, "value_scales": scale}
        found = kv.paged_attention(query, *caches, BLOCK_TABLE, SEQ_LENS, **keywords)
        expected = kv.paged_attention(query, *decoded, BLOCK_TABLE, SEQ_LENS)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("bits", [False, True], ids=["float8", "uint8"])
def test_vllm_s_names_of_static_formats(name, bits):
    """vLLM's caches hold either dtype; its scales have no axis."""
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    rows, one = torch.randn(len(SLOTS), HEADS, SIZE), torch.tensor(0.5)
    expected, found = (torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE, dtype=dtype) for _ in range(2))
    kv.reshape_and_cache_fp8(rows, rows, *expected, one.reshape(1), one.reshape(1), SLOTS)
    caches = found.view(torch.uint8) if bits else found
    torch.ops.kvcache_dpex.reshape_and_cache_flash(rows, rows, *caches, SLOTS, name, one, one)
    assert expected.float().any()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
