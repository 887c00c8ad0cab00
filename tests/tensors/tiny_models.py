"""Random models of eight kinds, small enough to generate in a second."""

import torch
import transformers

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_WINDOW = 19
_KINDS = {
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": _WINDOW}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": _WINDOW, "attn_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": _WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_scaling": None,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
}
KINDS = list(_KINDS)
# Their soft caps and sinks are in eager attention only.
OWN_ATTENTION = {kind: "eager" if kind in ("gemma2", "gpt-oss") else "sdpa" for kind in KINDS}


def tiny(kind):
    """A model whose weights are spread so that its greedy tokens vary."""
    name, options = _KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**_COMMON, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=OWN_ATTENTION[kind])
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data.normal_(0, 1)
        elif parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    return model.eval()
