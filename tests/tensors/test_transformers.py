"""PagedCache in transformers' generate: the tokens of transformers' own cache, in every mode it has."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'kvcache_dpex[transformers]'"
)

from tiny_models import KINDS, OWN_ATTENTION, tiny  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import kvcache_dpex  # noqa: E402
from kvcache_dpex.transformers import PagedCache  # noqa: E402
from kvcache_dpex.transformers.tables import Tables  # noqa: E402

FORMATS = ["int8_per_token_head", "fp8_per_token_head"]
# The tiny models of these repeat few tokens; their logits are compared too.
DEGENERATE = ("gemma2", "gemma3")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These models are too small for more, which wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_of():
    """A model of a kind; made once."""
    models = {}

    def make(kind):
        if kind not in models:
            models[kind] = tiny(kind)
        models[kind].set_attn_implementation(OWN_ATTENTION[kind])
        return models[kind]

    return make


def inputs_of(rows=slice(None)):
    """Three prompts of different lengths, padded on the left."""
    ids = torch.randint(3, 256, (3, 30), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :9] = mask[2, :4] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids[rows], "attention_mask": mask[rows]}


MODES = {
    "greedy": (slice(None), {}),
    "beams": (slice(None), {"num_beams": 4, "num_return_sequences": 2}),
    "samples": (slice(None), {"do_sample": True, "num_return_sequences": 3}),
    "prompt lookup": (slice(1, 2), {"prompt_lookup_num_tokens": 3}),
    "prompt in chunks": (slice(None), {"prefill_chunk_size": 7}),  # the first is all padding in one row
}


def generate(model, cache, mode="greedy", **options):
    rows, of_mode = MODES[mode]
    torch.manual_seed(5)
    settings = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, **of_mode, **options}
    return model.generate(
        **inputs_of(rows), cache=cache, return_dict_in_generate=True, output_logits=True, **settings
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_default_cache(model_of, kind, mode):
    if (kind, mode) == ("qwen3-next", "prompt lookup"):
        pytest.skip("transformers has no assisted generation for models with a linear state")
    model = model_of(kind)
    expected = generate(model, DynamicCache(config=model.config), mode)
    for attention in (OWN_ATTENTION[kind], "kvcache_dpex"):
        model.set_attn_implementation(attention)
        found = generate(model, PagedCache(model.config, block_size=8), mode)
        assert torch.equal(found.sequences, expected.sequences)
        for one, other in zip(found.logits, expected.logits):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if kind not in DEGENERATE:
        assert len(set(expected.sequences[0, 30:].tolist())) > 4


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt-oss", "deepseek-v3", "qwen3-next"])
def test_quantized_caches_read_in_place_as_gathered(model_of, kind, format):
    """The same codes, read where they are or decoded first."""
    model = model_of(kind)
    gathered = generate(model, PagedCache(model.config, format=format, block_size=8), max_new_tokens=6)
    exact = generate(model, DynamicCache(config=model.config), max_new_tokens=6)
    model.set_attn_implementation("kvcache_dpex")
    found = generate(model, PagedCache(model.config, format=format, block_size=8), max_new_tokens=6)
    # A value that is rounded differently may get another code, which these models amplify.
    assert similarity(found, gathered) > 0.999
    assert similarity(found, exact) > 0.9
    assert not torch.equal(found.logits[0], exact.logits[0])


def similarity(one, other):
    return torch.nn.functional.cosine_similarity(one.logits[0], other.logits[0]).min()


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_attention_without_this_cache(model_of, kind):
    """transformers' own cache, and no cache, under attn_implementation="kvcache_dpex"."""
    model = model_of(kind)
    expected = generate(model, DynamicCache(config=model.config)).sequences
    model.set_attn_implementation("kvcache_dpex")
    assert torch.equal(generate(model, DynamicCache(config=model.config)).sequences, expected)
    assert torch.equal(generate(model, None, use_cache=False).sequences, expected)


def test_an_assistant_with_a_cache_of_its_own(model_of):
    model, assistant = model_of("llama"), copy.deepcopy(model_of("llama"))
    for parameter in assistant.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    expected = generate(model, DynamicCache(config=model.config), "prompt lookup").sequences
    model.set_attn_implementation("kvcache_dpex")
    rows = inputs_of(slice(1, 2))
    found = model.generate(
        **rows,
        cache=PagedCache(model.config),
        assistant_model=assistant,
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=0,
    )
    assert torch.equal(found, expected)


def test_beams_share_blocks(model_of):
    """A prompt of 200 tokens and four beams: its blocks are held once."""
    model = model_of("llama")
    model.set_attn_implementation("kvcache_dpex")
    ids = torch.randint(3, 256, (1, 200), generator=torch.Generator().manual_seed(3))
    cache = PagedCache(model.config, block_size=8)
    model.generate(ids, cache=cache, num_beams=4, max_new_tokens=24, pad_token_id=0, do_sample=False)
    (tables,) = cache.tables.values()
    used, alone = tables.pool.stats().used, -(-223 // 8)
    assert len(tables.rows) == 4
    assert alone <= used <= alone + 4 * 4


def test_a_mask_that_knows_more_padding_than_its_chunk_has():
    tables = Tables(block_size=4, window=None, num_blocks=None)
    for start, count, lens in ((0, 3, [0, 3]), (3, 4, [2, 7])):
        step = tables.advance(start, 2, count, [5, 0], torch.device("cpu"))
        assert step.seq_lens.tolist() == lens
        assert (step.slots.view(2, count) < 0).sum(1).tolist() == [count - lens[0], 0]


def test_windows_give_blocks_back(model_of):
    model = model_of("mistral")
    model.set_attn_implementation("kvcache_dpex")
    cache = PagedCache(model.config, block_size=4)
    generate(model, cache, max_new_tokens=60)
    (tables,) = cache.tables.values()
    assert tables.length == 89
    assert tables.pool.stats().used <= 3 * (19 // 4 + 2)


@pytest.mark.parametrize("attention", ["sdpa", "kvcache_dpex"])
def test_bytes(model_of, attention):
    """What sequences hold and what is allocated; quantized caches take a quarter and the scales."""
    model = model_of("llama")
    model.set_attn_implementation(attention)
    sizes = {}
    for format in (None, *FORMATS):
        cache = PagedCache(model.config, format=format, block_size=8)
        assert (cache.bytes_in_use(), cache.bytes_allocated()) == (0, 0)
        generate(model, cache)
        sizes[format] = cache.bytes_in_use()
        (tables,) = cache.tables.values()
        stats = tables.pool.stats()
        assert stats.used == sum(-(-(53 - pad) // 8) for pad in ([9, 0, 4] if cache.in_place else [0, 0, 0]))
        assert cache.bytes_allocated() * stats.used == cache.bytes_in_use() * stats.num_blocks
        assert f"{stats.used} of {stats.num_blocks} blocks of 8" in cache.summary()
        assert f"{sizes[format]:,} of {cache.bytes_allocated():,} bytes in use" in repr(cache)
    blocks = sizes[None] // (4 * 2 * 8 * 2 * 16 * 4)
    assert sizes[None] == blocks * 4 * 2 * 8 * 2 * 16 * 4
    assert sizes[FORMATS[0]] == sizes[FORMATS[1]] == blocks * 4 * 2 * 8 * 2 * (16 + 4)


@pytest.mark.parametrize("attention", ["sdpa", "kvcache_dpex"])
def test_a_pool_of_fixed_size(model_of, attention):
    model = model_of("llama")
    model.set_attn_implementation(attention)
    cache = PagedCache(model.config, block_size=8, num_blocks=21)
    expected = generate(model, DynamicCache(config=model.config)).sequences
    assert torch.equal(generate(model, cache).sequences, expected)
    allocated = cache.bytes_allocated()
    cache.reset()
    assert cache.bytes_in_use() == 0
    assert torch.equal(generate(model, cache).sequences, expected)
    assert cache.bytes_allocated() == allocated
    with pytest.raises(kvcache_dpex.OutOfBlocks, match="of 6 are free"):
        generate(model, PagedCache(model.config, block_size=8, num_blocks=6))


@pytest.mark.parametrize("attention", ["sdpa", "kvcache_dpex"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek-v3"])
def test_batches_that_change(model_of, kind, attention):
    """Rows are repeated, chosen and put in order, and tokens taken back: logits of the default cache."""
    model = model_of(kind)
    inputs = inputs_of()
    logits = []
    for make in (lambda: DynamicCache(config=model.config), lambda: PagedCache(model.config, block_size=4)):
        if logits:
            model.set_attn_implementation(attention)
        cache = make()
        mask = inputs["attention_mask"]
        found = [forward(model, cache, inputs["input_ids"], mask)]
        cache.batch_repeat_interleave(2)
        mask = mask.repeat_interleave(2, 0)
        mask, one = step(model, cache, mask, 6)
        cache.reorder_cache(torch.tensor([1, 0, 3, 3, 4, 5]))
        mask = mask[[1, 0, 3, 3, 4, 5]]
        mask, two = step(model, cache, mask, 7)
        cache.batch_select_indices(torch.tensor([0, 2, 5]))
        mask = mask[[0, 2, 5]]
        mask, three = step(model, cache, mask, 8)
        cache.activate_past_recording()
        mask, four = step(model, cache, mask, 9)
        cache.crop(-1)
        mask, five = step(model, cache, mask[:, :-1], 10)
        assert cache.get_seq_length() == 34
        logits.append([*found, one, two, three, four, five])
    for ours, theirs in zip(logits[1], logits[0]):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def forward(model, cache, ids, mask):
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
    return out.logits[:, -1]


def step(model, cache, mask, token):
    """One more token for each row: the mask with it, and its logits."""
    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    ids = (torch.arange(len(mask)) + 3 * token)[:, None]
    return mask, forward(model, cache, ids, mask)


def test_half_precision(model_of):
    """A model in bfloat16 and in float16: the cache has the model's dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        model = copy.deepcopy(model_of("llama")).to(dtype)
        expected = generate(model, DynamicCache(config=model.config), max_new_tokens=1).logits[0].float()
        model.set_attn_implementation("kvcache_dpex")
        cache = PagedCache(model.config)
        found = generate(model, cache, max_new_tokens=1).logits[0].float()
        assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.998
        assert {each.dtype for layer in cache.paged for each in layer.caches} == {dtype}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "int3"}, ValueError, "`format` must be one of int8_per_token_head"),
        ({"block_size": 0}, ValueError, "`block_size`"),
        ({"num_blocks": -1}, ValueError, "`num_blocks`"),
    ],
)
def test_arguments_that_are_refused(model_of, options, error, message):
    with pytest.raises(error, match=message):
        PagedCache(model_of("llama").config, **options)


def test_a_device_that_is_not_the_models(model_of):
    model = model_of("llama")
    with pytest.raises(ValueError, match="`device` must be that of the layer, cpu, got meta"):
        generate(model, PagedCache(model.config, device="meta"))


def test_requests_that_are_refused(model_of):
    model = model_of("llama")
    model.set_attn_implementation("kvcache_dpex")
    inputs = inputs_of()
    with pytest.raises(NotImplementedError, match="kvcache_dpex does not support training"):
        model(**inputs)
    with torch.no_grad():
        right = {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}
        with pytest.raises(NotImplementedError, match="padding on the left only"):
            model(**right, cache=PagedCache(model.config))
        mask = torch.zeros(3, 1, 30, 30)
        with pytest.raises(NotImplementedError, match="does not support a mask made elsewhere"):
            model(inputs["input_ids"], attention_mask=mask, cache=PagedCache(model.config))
        packed = torch.cat([torch.arange(15), torch.arange(15)])[None].expand(3, -1)
        with pytest.raises(NotImplementedError, match="asks for another mask"):
            model(inputs["input_ids"], position_ids=packed, cache=None, use_cache=False)
        static = transformers.StaticCache(config=model.config, max_cache_len=64)
        with pytest.raises(NotImplementedError, match="not static ones"):
            model(inputs["input_ids"], cache=static)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"position_bias": torch.zeros(1)}, "a position bias"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_what_attention_does_not_support(options, message):
    from kvcache_dpex.transformers.attention import paged_attention_forward

    query, key = torch.ones(1, 4, 1, 16), torch.ones(1, 2, 1, 16)
    with pytest.raises(NotImplementedError, match=f"kvcache_dpex does not support {message}; use another"):
        paged_attention_forward(torch.nn.Module(), query, key, key, None, **options)


def test_a_model_that_changes_keys_after_the_cache(model_of):
    """Blocks cannot follow that: refused, instead of attending to something else."""
    from kvcache_dpex.transformers.attention import paged_attention_forward
    from kvcache_dpex.transformers.cache import HANDLE

    key, value = torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16)
    setattr(key, HANDLE, object())
    with pytest.raises(NotImplementedError, match="changes its keys or values after the cache"):
        paged_attention_forward(torch.nn.Module(), torch.ones(1, 4, 1, 16), key, value, None)


def test_a_crop_to_a_length_is_refused(model_of):
    """transformers once took a positive number for the length to keep."""
    cache = PagedCache(model_of("llama").config)
    with pytest.raises(ValueError, match="`tokens_to_remove` must be negative or 0, got 5"):
        cache.crop(5)


def test_a_batch_of_another_size(model_of):
    model = model_of("llama")
    cache = PagedCache(model.config)
    with torch.no_grad():
        model(inputs_of()["input_ids"], cache=cache)
        with pytest.raises(ValueError, match="the cache holds a batch of 3, got one of 1"):
            model(torch.tensor([[5]]), cache=cache)
