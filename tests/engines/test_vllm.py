"""vLLM with its own attention and with this package's: equal tokens, on the CPU.

Run by ``.ci/vllm``, in an environment of its own; skipped elsewhere. Each engine has a process of its own.
"""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec

import pytest

from helpers import ROOT

if find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed; .ci/vllm installs it in an environment of its own", allow_module_level=True
    )
torch = pytest.importorskip("torch", reason="torch is not installed")

RUN = ROOT / "benchmarks" / "vllm_run.py"
MODEL = os.environ.get("KVCACHE_DPEX_SMOLLM2")
SHORT = [
    "The capital of France is",
    "def fibonacci(n):",
    "Paged attention stores keys and values in",
    "Once upon a time",
    "Water boils at",
    "The three primary colors are",
    "To be or not to be,",
    "In 1969, humans first",
    "import numpy as np",
    "The mitochondria is",
    "A cache is useful when",
    "Dear Sir or Madam,",
]
LONG = [
    "A paged cache keeps keys and values of every token in blocks of equal size, so that a sequence grows by "
    "one block at a time and no memory is lost between sequences. " * count + ending
    for count, ending in [(2, "In short,"), (3, "Therefore"), (5, "The blocks"), (7, "Finally,")]
]
PROMPTS = SHORT + LONG


def run(batches, *, ours, environment=(), sampling=(), **engine):
    """What one engine generated, with this package's attention or with vLLM's own."""
    request = {
        "engine": {"model": MODEL, **engine},
        "batches": [{"prompts": prompts, "max_tokens": 24, **dict(sampling)} for prompts in batches],
    }
    return _run(json.dumps(request), ours, tuple(dict(environment).items()))


@cache
def _run(request, ours, environment):
    done = start(request, {"KVCACHE_DPEX_VLLM": str(int(ours)), **dict(environment)})
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def start(request, environment):
    return subprocess.run(
        [sys.executable, str(RUN), request],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def agreement(one, other):
    pairs = [pair for ours, theirs in zip(one, other) for pair in zip(ours, theirs)]
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.fixture(scope="module", autouse=True)
def model():
    if MODEL is None:
        pytest.skip("KVCACHE_DPEX_SMOLLM2 names no folder with SmolLM2-135M; .ci/vllm makes one")


def test_tokens_are_those_of_vllm():
    """16 greedy prompts, short and long, in one batch; 1 GiB holds as many tokens."""
    stock, ours = run([PROMPTS], ours=False), run([PROMPTS], ours=True)
    assert len({tuple(each) for each in stock["tokens"][0]}) == len(PROMPTS)
    assert ours["tokens"] == stock["tokens"]
    assert ours["capacity"] == stock["capacity"]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts(layout):
    """vLLM lays blocks out by token or by head."""
    stock = run([PROMPTS], ours=False)
    ours = run([PROMPTS], ours=True, environment={"VLLM_KV_CACHE_LAYOUT": layout})
    assert ours["tokens"] == stock["tokens"]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "loss", "tokens"),
    [
        ("int8_per_token_head", 0.02, 0.7),
        ("fp8_per_token_head", 0.02, 0.7),
        ("fp8", 0.05, 0.5),
        ("fp8_e5m2", 0.1, 0.3),
    ],
)
def test_quantized_caches(kv_cache_dtype, loss, tokens):
    """More than 3.7 times the tokens in the same memory, and nearly the same loss."""
    sampling = {"prompt_logprobs": 0, "max_tokens": 1}
    exact = run([LONG], ours=True, sampling=sampling)
    found = run([LONG], ours=True, sampling=sampling, kv_cache_dtype=kv_cache_dtype)
    assert found["capacity"] > 3.7 * exact["capacity"]
    for ours, theirs in zip(found["losses"][0], exact["losses"][0]):
        assert ours == pytest.approx(theirs, abs=loss)
        assert ours != theirs
    same = agreement(
        run([PROMPTS], ours=True, kv_cache_dtype=kv_cache_dtype)["tokens"][0],
        run([PROMPTS], ours=True)["tokens"][0],
    )
    assert same > tokens


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_per_token_head"])
def test_prefixes_are_cached(kv_cache_dtype):
    """The second batch finds the blocks of the first, and continues with the same tokens."""
    engine = {"kv_cache_dtype": kv_cache_dtype, "block_size": 32}
    ours = run([LONG, LONG], ours=True, **engine)
    assert ours["tokens"][0] == ours["tokens"][1]
    assert min(ours["cached"][1]) > 32
    if kv_cache_dtype == "auto":
        stock = run([LONG, LONG], ours=False, **engine)
        assert (ours["tokens"], ours["cached"]) == (stock["tokens"], stock["cached"])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_per_token_head"])
def test_prompts_in_chunks(kv_cache_dtype):
    """Prompts of more than a hundred tokens, 64 tokens a step, mixed with decoding."""
    whole = run([PROMPTS], ours=True, kv_cache_dtype=kv_cache_dtype)
    chunked = run([PROMPTS], ours=True, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=64)
    if kv_cache_dtype == "auto":
        assert chunked["tokens"] == whole["tokens"]
    else:  # a chunk attends to codes where a whole prompt's tokens do as well: the same, but for rounding
        assert agreement(chunked["tokens"][0], whole["tokens"][0]) > 0.9


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_per_token_head"])
def test_preemption(kv_cache_dtype):
    """Blocks for about a third of what the batch needs: sequences are preempted, and their tokens stay."""
    engine = {"kv_cache_dtype": kv_cache_dtype, "block_size": 16}
    sampling = {"max_tokens": 64}
    free = run([PROMPTS], ours=True, sampling=sampling, **engine)
    tight = run(
        [PROMPTS],
        ours=True,
        sampling=sampling,
        num_gpu_blocks_override=40,
        enable_prefix_caching=False,
        **engine,
    )
    assert free["preemptions"] == 0
    assert tight["preemptions"] > 0
    assert agreement(tight["tokens"][0], free["tokens"][0]) == 1 or kv_cache_dtype != "auto"
    assert agreement(tight["tokens"][0], free["tokens"][0]) > 0.9


def test_the_engine_in_its_own_process():
    stock = run([PROMPTS], ours=False)
    ours = run([PROMPTS], ours=True, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert ours["tokens"] == stock["tokens"]


def test_an_engine_that_is_started_again():
    """A new process with the same request gives the same tokens."""
    first = run([PROMPTS], ours=True)
    _run.cache_clear()
    assert run([PROMPTS], ours=True)["tokens"] == first["tokens"]


def test_sliding_windows(tmp_path):
    """A small Mistral with random weights and a window of 32 tokens, prompts far beyond it."""
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=32,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    batch = {"model": str(tmp_path), "block_size": 32}
    stock, ours = run([LONG], ours=False, **batch), run([LONG], ours=True, **batch)
    assert len({token for tokens in stock["tokens"][0] for token in tokens}) > 4
    assert ours["tokens"] == stock["tokens"]


def test_blocks_through_a_connector(tmp_path):
    """vLLM's own connector stores int8 blocks, scales inline, and another engine goes on from them."""

    def role(name):
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": name,
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        }
        sampling = {"max_tokens": 1 if name == "kv_producer" else 12}
        engine = {"block_size": 32, "enable_prefix_caching": False, "kv_cache_dtype": "int8_per_token_head"}
        return run([LONG[:1]], ours=True, sampling=sampling, kv_transfer_config=transfer, **engine)

    role("kv_producer")
    assert list(tmp_path.iterdir())
    alone = run([LONG[:1]], ours=True, sampling={"max_tokens": 12}, kv_cache_dtype="int8_per_token_head")
    consumer = role("kv_consumer")
    assert consumer["cached"][0][0] >= 32
    assert consumer["tokens"] == alone["tokens"]


@pytest.mark.parametrize(
    ("variable", "engine", "message"),
    [
        ("1", {"kv_cache_dtype": "turboquant_k8v4"}, "kv_cache_dtype='turboquant_k8v4'"),
        ("yes", {}, "KVCACHE_DPEX_VLLM must be 0 or 1, got 'yes'"),
    ],
)
def test_what_is_refused_at_start(variable, engine, message):
    request = json.dumps({"engine": {"model": MODEL, **engine}, "batches": []})
    done = start(request, {"KVCACHE_DPEX_VLLM": variable})
    assert message in done.stdout + done.stderr
    if variable == "1":
        assert done.returncode != 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes="),
        ({"attn_type": "encoder_only"}, "attn_type='encoder_only'"),
        ({"kv_cache_dtype": "fp8_inc"}, "kv_cache_dtype='fp8_inc'"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt=True"),
    ],
)
def test_layers_that_are_refused(options, message):
    from kvcache_dpex.vllm.backend import Impl

    with pytest.raises(NotImplementedError, match=f"kvcache_dpex does not support {message}"):
        Impl(4, 32, 1.0, **options)


@pytest.mark.parametrize("by_head", [False, True])
def test_views_of_inline_scales(by_head):
    """Codes and scales of every token and head, whichever way the block lies."""
    from kvcache_dpex.vllm.backend import caches_of

    shape = (3, 2, 5, 2 * (8 + 4)) if by_head else (3, 5, 2, 2 * (8 + 4))
    memory = torch.arange(3 * 2 * 5 * 24).reshape(shape).to(torch.int8)
    kv_cache = memory if by_head else memory.transpose(1, 2)
    caches = caches_of(kv_cache, 8, "int8_per_token_head")
    for block, head, token in [(0, 0, 0), (2, 1, 4), (1, 0, 3)]:
        row = kv_cache[block, head, token]
        assert caches.key_cache[block, token, head].tolist() == row[:8].tolist()
        assert caches.value_cache[block, token, head].tolist() == row[12:20].tolist()
        bits = [scales[block, token, head].view(torch.int32) for scales in caches[2:]]
        assert bits == [row[8:12].view(torch.int32), row[20:].view(torch.int32)]
