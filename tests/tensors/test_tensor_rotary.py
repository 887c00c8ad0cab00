"""Rotary embedding, latents and slots on torch tensors, beside torch's own operations."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvcache_dpex import torch as kv  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def table_of(count, rotary_dim):
    inverse = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(count).float(), inverse)
    return torch.cat([angles.cos(), angles.sin()], 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_is_that_of_transformers(dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    table = table_of(64, 32)
    positions = torch.tensor([3, 63, 0, 17])
    query, key, value = (torch.randn(4, heads, 32).to(dtype) for heads in (6, 2, 2))
    cos, sin = (torch.cat([half, half], 1)[None] for half in table[positions].split(16, 1))
    rows = (each.float().transpose(0, 1)[None] for each in (query, key))
    wanted = [each[0].transpose(0, 1) for each in llama.apply_rotary_pos_emb(*rows, cos, sin)]
    caches = kv.empty_cache(3, 4, 2, 32, dtype=dtype, device="cpu")
    slots = torch.tensor([5, -1, 0, 11])
    kv.rotary_and_cache(positions, query, key, value, table, *caches, slots)
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for own, other in zip((query, key), wanted):
        torch.testing.assert_close(own.float(), other, rtol=tolerance, atol=tolerance)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(caches[0].view(12, 2, 32)[slot], key[token])
            assert torch.equal(caches[1].view(12, 2, 32)[slot], value[token])
    assert caches[0].view(12, 2, 32).any((1, 2)).sum() == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_beside_rope_keys(dtype):
    latent, rope = torch.randn(3, 512).to(dtype), torch.randn(3, 64).to(dtype)
    cache = torch.zeros(2, 4, 576, dtype=dtype)
    kv.concat_and_cache_mla(latent, rope, cache, torch.tensor([6, -1, 1]))
    assert torch.equal(cache.view(8, 576)[[6, 1]], torch.cat([latent, rope], 1)[[0, 2]])
    assert cache.view(8, 576).any(1).sum() == 2


def test_latents_as_codes():
    latent, rope = torch.randn(3, 512), torch.randn(3, 64)
    cache, scales = torch.zeros(2, 4, 576, dtype=torch.int8), torch.zeros(8, 2)
    kv.concat_and_cache_mla(latent, rope, cache, torch.tensor([6, -1, 1]), scales=scales)
    codes = cache.view(8, 576)[6].float()
    decoded = torch.cat([codes[:512] * scales[6, 0], codes[512:] * scales[6, 1]])
    assert (decoded - torch.cat([latent[0], rope[0]])).abs().max() <= scales[6].max()


def test_flashinfer_s_names():
    lens, starts = torch.tensor([6, 9], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    indptr, indices = torch.tensor([0, 2, 5]).int(), torch.tensor([5, 1, 0, 3, 2]).int()
    rows = torch.randn(2, 5, 3, 8)
    both = torch.zeros(6, 2, 4, 3, 8)
    batch, positions = kv.get_batch_indices_positions(starts, lens, 5)
    kv.append_paged_kv_cache(*rows, batch, positions, both, indices, indptr)
    for token, (sequence, position) in enumerate(zip(batch.tolist(), positions.tolist())):
        block = indices[indptr[sequence] + position // 4]
        assert torch.equal(both[block, :, position % 4], rows[:, token])
    assert both.flatten(3).any(3)[:, 0].sum() == 5


def test_slots_are_traced():
    @torch.compile(backend="eager", fullgraph=True)
    def mapped(table, positions):
        return kv.slot_mapping(table, positions, 4) + 1

    found = mapped(torch.tensor([[2, 1], [0, 3]]), torch.tensor([5, 2]))
    assert found.tolist() == [6, 3]
