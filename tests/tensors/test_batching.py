"""transformers' continuous batching from a pool of codes and scales."""

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.24", reason="transformers is not installed")

import torch
from tiny_models import tiny
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache as batching
from transformers.generation.continuous_batching.distributed import DistributedHelper

from helpers import ROOT, output_of
from kvcache_dpex import formats, reference
from kvcache_dpex.commands.hub import write_hub
from kvcache_dpex.transformers import quantized_pool

FORMATS = list(formats.QUANTIZED)
_RANDOM = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 256, (length,), generator=_RANDOM).tolist() for length in (40, 7, 19, 33)]
SETTINGS = {"page_size": 16, "num_blocks": 16, "max_batch_tokens": 64, "use_cuda_graph": False}
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def batched(model, prompts):
    """What generate_batch gives for each prompt; prompts longer than a batch are read in chunks."""
    config = GenerationConfig(eos_token_id=-1, **OPTIONS)
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**SETTINGS),
        progress_bar=False,
    )
    names = sorted(outputs, key=lambda name: int(name.rsplit("_")[-1]))
    return [outputs[name].generated_tokens for name in names]


def one_by_one(model, prompts):
    found = [model.generate(torch.tensor([prompt]), **OPTIONS)[0].tolist() for prompt in prompts]
    return [each[len(prompt) :] for each, prompt in zip(found, prompts)]


def made(config, **options):
    """A cache as generate_batch makes it."""
    settings = ContinuousBatchingConfig(
        **SETTINGS, max_requests_per_batch=4, max_memory_percent=0.5, **options
    )
    settings.max_blocks_per_request = 0
    return batching.PagedAttentionCache(config, settings, "cpu", DistributedHelper(None, 0), torch.float32)


def test_generate_batch_goes_on_from_codes():
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    wanted = one_by_one(model, PROMPTS)
    with quantized_pool("int8_per_token_head") as pool:
        found = batched(model, PROMPTS)
    pairs = [pair for ours, theirs in zip(found, wanted) for pair in zip(ours, theirs)]
    assert sum(a == b for a, b in pairs) >= len(pairs) / 2  # of 256 tokens, where one in 256 is chance
    assert pool.bytes_per_token == 4 * 2 * 2 * (16 + 4)  # layers, keys and values, heads, codes and scale
    assert pool.token_capacity >= 256 * 16 * 4 // (16 + 4)
    assert repr(pool) == f"<QuantizedPool: int8_per_token_head, {pool.token_capacity} tokens of 320 bytes>"
    assert batched(model, PROMPTS) == wanted
    assert pool.bytes_per_token == 320  # not that of the pool after it


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_written_and_read_as_the_oracle_says(format):
    config = tiny("llama").config
    with quantized_pool(format):
        allocator = made(config).cache_allocators["full_attention"]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(20, 2, 16, generator=generator) for _ in range(2)]
    before = allocator._copy_view.clone()
    tokens = torch.randperm(48, generator=generator)[:20]
    slots = (1 + tokens // 16) * allocator.block_physical_stride + tokens % 16
    nothing = slots[:0]
    assert all(a is b for a, b in zip(allocator.update(*rows, 1, nothing, slots), rows))
    kq, vq, ks, vs = reference.empty_quant_cache(int(slots.max()) + 1, 1, 2, 16, format=format)
    reference.reshape_and_cache_quant(
        *(row.numpy() for row in rows), kq, vq, ks, vs, slots.numpy(), format=format
    )
    read = slots.flip(0)
    found = allocator.update(*(row[:0] for row in rows), 1, read, nothing)
    for each, codes, scales in zip(found, (kq, vq), (ks, vs)):
        whole = reference.dequant_cache(codes, scales, format=format)
        np.testing.assert_array_equal(each.numpy(), whole[read.numpy(), 0])
    # Only these blocks have changed, and of them only the pages of this layer.
    changed = (allocator._copy_view != before).view(len(before), len(allocator.layer_indices), -1).any(-1)
    assert changed.nonzero().tolist() == [[block, 1] for block in (1, 2, 3)]


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_are_attended_where_they_are(format):
    from kvcache_dpex import torch as kv

    with quantized_pool(format):
        allocator = made(tiny("llama").config).cache_allocators["full_attention"]
    key, value, query = torch.randn(3, 20, 2, 16)
    table = torch.tensor([[5, 3]])
    pages = table * allocator.block_physical_stride // 16
    slots = pages.repeat_interleave(16)[:20] * 16 + torch.arange(20) % 16
    allocator.update(key[:19], value[:19], 2, slots[:0], slots[:19])
    caches = allocator.get_cache_for_block_table(2)
    out = kv.flash_attn_with_kvcache(
        query[None, 19:], *caches, key[None, 19:], value[None, 19:], cache_seqlens=19, block_table=pages
    )
    keys, values = allocator.update(key[:0], value[:0], 2, slots, slots[:0])
    exact = torch.nn.functional.scaled_dot_product_attention(
        query[19:].transpose(0, 1).double(), *(each.transpose(0, 1).double() for each in (keys, values))
    )
    torch.testing.assert_close(out[0, 0].double(), exact[:, 0], rtol=0, atol=2e-6)


def test_the_flash_kernel_decodes_in_place(tmp_path):
    """As on XPU, where transformers uses block tables; a stand-in says that there is one."""
    pytest.importorskip("kernels", reason="kernels is not installed: pip install 'kvcache_dpex[hub]'")
    repository = "kvcache-dpex/flash-attn2"
    write_hub(tmp_path / "hub", repository)
    printed = output_of(
        IN_PLACE, LOCAL_KERNELS=f"{repository}={tmp_path / 'hub'}", HF_HUB_OFFLINE="1", PYTHONPATH=TESTS
    )
    assert printed.splitlines()[-3:] == ["float True in place", "int8_per_token_head True in place", "done"]


TESTS = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), str(ROOT)])
IN_PLACE = """
from transformers.utils import is_kernels_available

# transformers 5.24 asks for kernels 0.18.2; 0.17.2 does as well here.
is_kernels_available = getattr(is_kernels_available, "__wrapped__", is_kernels_available)
is_kernels_available.__defaults__ = ("0.17", *is_kernels_available.__defaults__[1:])

import contextlib
import test_batching as batching
from transformers.generation.continuous_batching import initialization
import transformers.modeling_flash_attention_utils as loaded

model = batching.tiny("llama")
model.set_attn_implementation("sdpa")
wanted = batching.one_by_one(model, batching.PROMPTS)
model.set_attn_implementation("kvcache-dpex/flash-attn2", allow_all_kernels=True)
initialization.is_torch_xpu_available = lambda *given, **named: True
batching.SETTINGS["max_blocks_per_request"] = 8
calls = 0
function = loaded._flash_with_kvcache_fn

def counted(*given, **named):
    global calls
    calls += 1
    return function(*given, **named)

loaded._flash_with_kvcache_fn = counted
for name in ("float", "int8_per_token_head"):
    calls = 0
    pool = contextlib.nullcontext() if name == "float" else batching.quantized_pool(name)
    with pool:
        found = batching.batched(model, batching.PROMPTS)
    pairs = [pair for ours, theirs in zip(found, wanted) for pair in zip(ours, theirs)]
    good = found == wanted if name == "float" else sum(a == b for a, b in pairs) >= len(pairs) / 2
    print(name, good, "in place" if calls else "gathered")
print("done")
"""


def test_what_a_quantized_pool_does_not_have():
    expected = pytest.raises(ValueError, match=r"^`format` must be one of int8_per_token_head, ")
    with expected, quantized_pool("int8"):
        pass
    with quantized_pool("int8_per_token_head"):
        with pytest.raises(NotImplementedError, match="layers of full attention only"):
            made(tiny("mistral").config)
        config = tiny("llama").config
        config.head_dim = 18
        with pytest.raises(ValueError, match=r"a multiple of 4 for a quantized pool, got 18$"):
            made(config)
    with pytest.raises(KeyError), quantized_pool("int8_per_token_head"):
        raise KeyError
    assert type(made(tiny("mistral").config).cache_allocators["sliding_attention"]).__module__.startswith(
        "transformers."
    )
