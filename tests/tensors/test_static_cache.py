"""StaticPagedCache: the tokens of transformers' own cache, from one graph."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.24", reason="transformers is not installed")

import torch
from tiny_models import KINDS, tiny
from transformers import CompileConfig

from kvcache_dpex.transformers import StaticPagedCache

INT8 = "int8_per_token_head"


def inputs(**options):
    ids = torch.randint(3, 256, (3, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = ids[0, :5] = 0
    given = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    return {**given, "max_new_tokens": 12, **options}


def compiled():
    """One graph or an error, also on the CPU."""
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_the_dynamic_cache(kind):
    model = tiny(kind)
    wanted = model.generate(**inputs())
    found = model.generate(**inputs(), cache=StaticPagedCache(model.config, 40), disable_compile=True)
    assert torch.equal(found, wanted)
    assert len(set(wanted[1, 21:].tolist())) > 1 or kind.startswith("gemma")


@pytest.mark.parametrize("format", [None, INT8, "fp8_per_token_head"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek-v3", "qwen3-next"])
def test_one_graph(kind, format):
    model = tiny(kind)
    caches = [StaticPagedCache(model.config, 40, format=format) for _ in range(2)]
    eager = model.generate(**inputs(), cache=caches[0], disable_compile=True)
    found = model.generate(**inputs(), cache=caches[1], compile_config=compiled())
    assert torch.equal(found, eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for one, other in zip(*(cache.layers for cache in caches)):
        for mine, theirs in zip(getattr(one, "caches", ()), getattr(other, "caches", ())):
            if format is None:  # codes may differ by the rounding of the values that they are of
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
            assert mine.view(torch.uint8).any()


@pytest.mark.parametrize("format", [None, INT8])
def test_reset_crop_and_reorder(format):
    model = tiny("llama")
    cache = StaticPagedCache(model.config, 40, format=format, block_size=8)
    ids = inputs()["input_ids"]
    with torch.no_grad():
        first = model(ids, cache=cache).logits
        cache.crop(-6)
        assert int(cache.get_seq_length()) == 15
        again = model(ids[:, 15:], cache=cache).logits
        torch.testing.assert_close(again, first[:, 15:], rtol=0, atol=1e-5)
        order = torch.tensor([2, 0, 0])
        cache.reorder_cache(order)
        moved = model(ids[order, :1], cache=cache).logits
        cache.reset()
        assert int(cache.get_seq_length()) == 0
        model(ids[order], cache=cache)
        torch.testing.assert_close(model(ids[order, :1], cache=cache).logits, moved, rtol=0, atol=1e-5)


def test_beams():
    model = tiny("llama")
    options = inputs(num_beams=3, num_return_sequences=2)
    wanted = model.generate(**options)
    cache = StaticPagedCache(model.config, 40)
    assert torch.equal(model.generate(**options, cache=cache, disable_compile=True), wanted)


def test_bytes_are_shown():
    model = tiny("llama")
    cache = StaticPagedCache(model.config, 33, format=INT8)
    assert cache.bytes_allocated() == 0
    model.generate(**inputs(), cache=cache, disable_compile=True)
    tokens = 3 * 48  # whole blocks
    assert cache.bytes_allocated() == 4 * 2 * tokens * 2 * (16 + 4)
    assert repr(cache) == (
        "<StaticPagedCache: int8_per_token_head, 4 layers of 48 tokens a sequence, 46,080 bytes>"
    )


def test_a_full_cache_is_an_error_and_writes_nothing():
    model = tiny("llama")
    cache = StaticPagedCache(model.config, 32)
    ids = torch.randint(3, 256, (2, 33))
    with torch.no_grad():
        model(ids[:, :31], cache=cache)
        before = [each.clone() for each in cache.layers[0].caches]
        with pytest.raises(RuntimeError, match="holds 32 tokens: make it with a larger max_cache_len"):
            model(ids[:, 31:], cache=cache)
    assert all(map(torch.equal, cache.layers[0].caches, before))


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match=r"^`format` must be one of int8_per_token_head, "):
        StaticPagedCache(tiny("llama").config, 40, format="int8")
    with pytest.raises(ValueError, match=r"^`max_cache_len` must be "):
        StaticPagedCache(tiny("llama").config, 0)
