"""flash-attn's functions against torch's own attention, and what they refuse."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from kvcache_dpex import reference
from kvcache_dpex import torch as kv


def expected(q, k, v, causal, left=-1, scale=None):
    """Attention of one sequence, [n, Hq, D] to [m, Hk, D], in float64."""
    n, m = len(q), len(k)
    rows, columns = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
    mask = columns <= rows if causal else torch.ones(n, m, dtype=torch.bool)
    if left >= 0:
        mask = mask & (columns >= rows - left)
    q, k, v = (each.double().transpose(0, 1)[None] for each in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).float()


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_equally_long(causal):
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    found = kv.flash_attn_func(q, k, v, causal=causal, softmax_scale=0.3)
    for each in range(2):
        close(found[each], expected(q[each], k[each], v[each], causal, scale=0.3))


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("causal", "left"), [(True, -1), (True, 2), (False, -1)])
def test_different_lengths(causal, left, paged):
    starts, firsts = torch.tensor([0, 3, 4]), torch.tensor([0, 7, 12])
    q, k, v = torch.randn(4, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    keys, values, table = k, v, None
    if paged:
        table = torch.tensor([[4, 1], [0, 3]])
        keys, values = torch.full((2, 5, 4, 2, 8), float("nan"))
        for sequence, (first, last) in enumerate(((0, 7), (7, 12))):
            for at in range(last - first):
                for to, rows in ((keys, k), (values, v)):
                    to[table[sequence, at // 4], at % 4] = rows[first + at]
    found = (
        kv.flash_attn_varlen_func(
            q, keys, values, starts, firsts, 3, 7, causal=causal, window_size=(left, left), block_table=table
        )
        if left < 0
        else kv.flash_attn_varlen_func(
            q, keys, values, starts, firsts, causal=causal, window_size=(left, 0), block_table=table
        )
    )
    close(found[:3], expected(q[:3], k[:7], v[:7], causal, left))
    close(found[3:], expected(q[3:], k[7:], v[7:], causal, left))


@pytest.mark.parametrize("paged", [True, False])
def test_with_a_cache(paged):
    """New rows are written where they belong, nothing else is, and attention sees them."""
    table = torch.tensor([[2, 0], [3, 5]], dtype=torch.int32) if paged else None
    caches = [torch.full((6, 4, 2, 8) if paged else (2, 8, 2, 8), 0.5) for _ in range(2)]
    before = [each.clone() for each in caches]
    q, k, v = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 2, 8), torch.randn(2, 2, 2, 8)
    lens = torch.tensor([3, 5])
    found = kv.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lens, block_table=table, causal=True)
    for each, count in enumerate(lens.tolist()):
        full = []
        for cache, rows in zip(before, (k, v)):
            sequence = cache[table[each].long()].flatten(0, 1) if paged else cache[each].clone()
            sequence[count : count + 2] = rows[each]
            if paged:
                cache[table[each].long()] = sequence.view(2, 4, 2, 8)
            else:
                cache[each] = sequence
            full.append(sequence[: count + 2])
        close(found[each], expected(q[each], *full, True))
    for cache, wanted in zip(caches, before):
        assert torch.equal(cache, wanted)


def test_new_rows_without_a_block_are_dropped():
    """Behind the end of the table, as where a batch is padded, and where the table says -1."""
    table = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32)
    caches = [torch.zeros(6, 4, 1, 8) for _ in range(2)]
    new = torch.ones(2, 3, 1, 8)
    kv.flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=torch.tensor([7, 3]), block_table=table)
    for cache in caches:
        assert cache.sum((2, 3)).nonzero().tolist() == [[0, 3], [3, 3]]


def test_with_a_cache_of_codes():
    kq, vq, ks, vs = kv.empty_quant_cache(4, 4, 2, 8, device="cpu")
    q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    kv.flash_attn_with_kvcache(
        q, (kq, ks), (vq, vs), k, v, cache_seqlens=5, block_table=torch.tensor([[3, 1]])
    )
    codes = [each.numpy() for each in kv.empty_quant_cache(4, 4, 2, 8, device="cpu")]
    reference.reshape_and_cache_quant(k[0].numpy(), v[0].numpy(), *codes, torch.tensor([5]).numpy())
    for found, wanted in zip((kq, vq, ks, vs), codes):
        assert torch.equal(found, torch.from_numpy(wanted))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dropout_p", {"dropout_p": 0.1}),
        ("alibi_slopes", {"alibi_slopes": torch.zeros(4)}),
        ("return_attn_probs", {"return_attn_probs": True}),
    ],
)
def test_what_is_not_supported_is_named(name, options):
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=f"`{name}` is not supported"):
        kv.flash_attn_func(q, q, q, **options)


@pytest.mark.parametrize(("window", "causal"), [((3, 1), True), ((3, 0), False)])
def test_windows_that_no_kernel_has(window, causal):
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(ValueError, match="`window_size` must be"):
        kv.flash_attn_func(q, q, q, causal=causal, window_size=window)


def test_a_key_without_a_value_changes_nothing():
    cache, new = torch.zeros(1, 4, 2, 8), torch.ones(1, 1, 2, 8)
    with pytest.raises(ValueError, match="`k` and `v` must both be given"):
        kv.flash_attn_with_kvcache(new, cache, cache, new, cache_seqlens=0)
    assert not cache.any()
