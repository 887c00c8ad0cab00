"""paged_attention on tensors: torch's own attention, types, results, compiled functions."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from kvcache_dpex import torch as kv  # noqa: E402

TYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def paged(seq_lens, dtype, *, heads=(8, 2), size=64, block_size=16, tokens=None):
    """A batch whose caches are filled by `reshape_and_cache`, and its keys and values one by one."""
    generator = torch.Generator().manual_seed(3)
    columns = -(-max(seq_lens) // block_size)
    table = torch.randperm(len(seq_lens) * columns, generator=generator).view(-1, columns).int()
    caches = kv.empty_cache(table.numel(), block_size, heads[1], size, dtype=dtype, device="cpu")
    rows = []
    for blocks, length in zip(table, seq_lens):
        key, value = torch.randn(2, length, heads[1], size, generator=generator).to(dtype)
        positions = torch.arange(length)
        slots = blocks[positions // block_size].long() * block_size + positions % block_size
        kv.reshape_and_cache(key, value, *caches, slots)
        rows.append((key, value))
    query = torch.randn(tokens or len(seq_lens), heads[0], size, generator=generator).to(dtype)
    return [query, *caches, table, torch.tensor(seq_lens, dtype=torch.int32)], rows


def attend(query, key, value):
    """torch's attention, in float64, causal and aligned to the end."""
    q, k, v = (each.double().transpose(0, 1)[None] for each in (query, key, value))
    mask = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", TYPES)
def test_decoding_is_torchs_attention(dtype):
    arguments, rows = paged([1, 37, 200], dtype)
    out = kv.paged_attention(*arguments)
    assert out.dtype == dtype
    for sequence, (key, value) in enumerate(rows):
        wanted = attend(arguments[0][sequence : sequence + 1], key, value)
        torch.testing.assert_close(
            out[sequence : sequence + 1].double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TYPES)
def test_prompts_and_chunks_are_torchs_attention(dtype):
    arguments, rows = paged([40, 33, 7], dtype, tokens=48)
    starts = [0, 40, 41, 48]
    out = kv.paged_attention(*arguments, query_start_loc=torch.tensor(starts, dtype=torch.int32))
    for sequence, (key, value) in enumerate(rows):
        own = slice(starts[sequence], starts[sequence + 1])
        wanted = attend(arguments[0][own], key, value)
        torch.testing.assert_close(out[own].double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_int8_is_attention_to_decoded_rows():
    arguments, _ = paged([37, 12], torch.float32)
    quantized = kv.empty_quant_cache(*arguments[1].shape, device="cpu")
    slots = torch.arange(arguments[1].shape[0] * 16)
    kv.reshape_and_cache_quant(*(each.flatten(0, 1) for each in arguments[1:3]), *quantized, slots)
    kq, vq, ks, vs = quantized
    decoded = [kv.dequant_cache(kq, ks), kv.dequant_cache(vq, vs)]
    out = kv.paged_attention(arguments[0], kq, vq, *arguments[3:], key_scales=ks, value_scales=vs)
    wanted = kv.paged_attention(arguments[0], *decoded, *arguments[3:])
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=2e-6)


def test_results():
    """`out` alone, with `lse`, and into tensors that are given: one, the other or both."""
    arguments, _ = paged([20, 3], torch.float32)
    out, lse = kv.paged_attention(*arguments, return_lse=True)
    assert torch.equal(kv.paged_attention(*arguments), out)
    own_out, own_lse = torch.empty_like(out), torch.empty_like(lse)
    assert kv.paged_attention(*arguments, out=own_out) is own_out
    both = kv.paged_attention(*arguments, lse=own_lse, return_lse=True)
    assert both[1] is own_lse
    assert torch.equal(both[0], out)
    assert torch.equal(own_out, out)
    assert torch.equal(own_lse, lse)
    own_lse.zero_()
    assert kv.paged_attention(*arguments, out=own_out, lse=own_lse) is own_out
    assert torch.equal(own_lse, lse)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_with_one_graph(return_lse):
    arguments, _ = paged([20, 3], torch.float32)

    def step(*given):
        found = kv.paged_attention(*given, soft_cap=5.0, sliding_window=9, return_lse=return_lse)
        return found if return_lse else (found,)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for own, other in zip(compiled(*arguments), step(*arguments)):
        assert torch.equal(own, other)
