"""transformers loads the flash functions from the hub repository, and generates the same tokens."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("kernels", reason="kernels is not installed: pip install 'kvcache_dpex[hub]'")
pytest.importorskip("transformers", reason="transformers is not installed")

from helpers import output_of
from kvcache_dpex.commands.hub import write_hub

GENERATE = """
import torch
from transformers.utils import is_kernels_available

# transformers 5.24 asks for kernels 0.18.2; 0.17.2 does as well here.
is_kernels_available = getattr(is_kernels_available, "__wrapped__", is_kernels_available)
is_kernels_available.__defaults__ = ("0.17", *is_kernels_available.__defaults__[1:])

from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
for weight in model.parameters():
    if weight.dim() > 1:
        weight.data.normal_(0, 0.15)
ids = torch.randint(3, 256, (2, 12))
mask = torch.ones_like(ids)
mask[0, :5] = ids[0, :5] = 0
options = dict(attention_mask=mask, do_sample=False, max_new_tokens=12, pad_token_id=0)
wanted = model.generate(ids, **options)
model.set_attn_implementation("kvcache-dpex/flash-attn2", allow_all_kernels=True)
found = model.generate(ids, **options)
import transformers.modeling_flash_attention_utils as loaded
print(loaded._flash_varlen_fn.__module__.split(".")[-1], len(set(wanted[1].tolist())) > 4)
print(torch.equal(found, wanted))
"""


def test_generate_with_the_hub_kernel(tmp_path):
    repository = "kvcache-dpex/flash-attn2"
    write_hub(tmp_path / "hub", repository)
    printed = output_of(GENERATE, LOCAL_KERNELS=f"{repository}={tmp_path / 'hub'}", HF_HUB_OFFLINE="1")
    assert printed.splitlines()[-2:] == ["torch_flash True", "True"]
