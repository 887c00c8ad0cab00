"""What is measured: cases, and presets of cases by name."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """One operation on one size of input.

    `operation` is "write", "int8", "fp8" or "dequantize"; a dequantize case counts its slots as tokens. Slots
    are
    as a server hands them out: of 512 tokens and more, a prefill, whole blocks in random order; of fewer,
    each the next token of another sequence, any slots. `random_slots` makes them any slots always.
    """

    operation: str
    tokens: int
    heads: int = 8
    size: int = 128
    dtype: str = "float32"
    block_size: int = 16
    model: str = ""
    random_slots: bool = False

    def __str__(self) -> str:
        what = f"{self.operation}, {self.tokens} tokens x {self.heads} heads x {self.size}, {self.dtype}"
        what += ", random slots" if self.random_slots else ""
        return f"{what} ({self.model})" if self.model else what

    @property
    def itemsize(self) -> int:
        return {"bfloat16": 2}.get(self.dtype) or np.dtype(self.dtype).itemsize

    @property
    def num_blocks(self) -> int:
        """256 blocks, as in the table of kv-cache-xpu, or just enough for the tokens."""
        if self.operation == "dequantize":
            return -(-self.tokens // self.block_size)
        return max(256, -(-self.tokens * 5 // 4 // self.block_size))

    def slot_mapping(self, rng: np.random.Generator) -> np.ndarray:
        if self.random_slots or self.tokens < PREFILL[0]:
            return rng.permutation(self.num_blocks * self.block_size)[: self.tokens]
        blocks = rng.permutation(self.num_blocks)[:, None]
        return (blocks * self.block_size + np.arange(self.block_size)).ravel()[: self.tokens]

    @property
    def num_bytes(self) -> int:
        """Bytes that the operation must read and write: rows and caches, scales, slots."""
        rows = self.tokens * self.heads
        values, scales, slots = rows * self.size, 4 * rows, 8 * self.tokens
        if self.operation == "write":
            return 4 * values * self.itemsize + slots
        if self.operation == "int8":
            return 2 * (values * (self.itemsize + 1) + scales) + slots
        if self.operation == "fp8":
            return 2 * values * (self.itemsize + 1) + slots
        return values * (1 + self.itemsize) + scales


DECODE, PREFILL = (1, 8, 64, 256), (512, 4096, 16384)
MODELS = {
    "Llama-3-8B": (8, 128),
    "Qwen2.5-7B": (4, 128),
    "SmolLM2-135M": (3, 64),
    "Gemma-2-9B": (8, 256),
}
SLOTS = (4096, 65536)
INT8_TOKENS = (8, 512, 4096)

PRESETS: dict[str, list[Case]] = {
    "table": [Case("write", 8), Case("int8", 8)],
    "decode": [Case("write", tokens) for tokens in DECODE],
    "prefill": [Case("write", tokens) for tokens in PREFILL],
    "random": [Case("write", tokens, random_slots=True) for tokens in PREFILL],
    "models": [
        Case("write", tokens, heads, size, "bfloat16", model=model)
        for model, (heads, size) in MODELS.items()
        for tokens in (8, 512)
    ],
    "dtypes": [
        Case("write", tokens, dtype=dtype)
        for tokens in (8, 512)
        for dtype in ("float32", "float16", "bfloat16", "int8")
    ],
    "int8": [
        Case("int8", tokens, dtype=dtype) for dtype in ("float32", "bfloat16") for tokens in INT8_TOKENS
    ],
    "fp8": [
        Case("fp8", tokens, dtype=dtype) for dtype in ("float32", "bfloat16") for tokens in INT8_TOKENS[1:]
    ],
    "dequantize": [
        Case("dequantize", slots, dtype=dtype) for dtype in ("float32", "float16") for slots in SLOTS
    ],
    "torch": [Case("write", 8), Case("write", 512), Case("int8", 8), Case("dequantize", 4096)],
    "bars": [
        Case("write", 8),
        Case("write", 4096),
        *(Case("int8", tokens) for tokens in INT8_TOKENS),
        *(Case("int8", tokens, dtype="bfloat16") for tokens in INT8_TOKENS[1:]),
        Case("dequantize", 65536),
    ],
}
DESCRIPTIONS = {
    "table": "8 tokens, 8 heads, 128: the table of kv-cache-xpu",
    "decode": f"writes of {', '.join(map(str, DECODE))} tokens",
    "prefill": f"writes of {', '.join(map(str, PREFILL))} tokens",
    "random": f"writes of {', '.join(map(str, PREFILL))} tokens to slots in random order",
    "models": f"bfloat16 rows of {', '.join(MODELS)}",
    "dtypes": "float32, float16, bfloat16, int8 rows, moved bit for bit",
    "int8": f"int8 writes of {', '.join(map(str, INT8_TOKENS))} tokens",
    "fp8": f"writes of e4m3 codes by a given scale, {' and '.join(map(str, INT8_TOKENS[1:]))} tokens",
    "dequantize": f"int8 caches of {' and '.join(map(str, SLOTS))} slots",
    "torch": "the operations on tensors, called directly and in torch.compile, beside torch's own",
    "bars": "what the project has set itself as goals, and whether they are reached",
}


def cases_of(presets: list[str]) -> list[Case]:
    """Every case of some presets, once."""
    return list(dict.fromkeys(case for preset in presets for case in PRESETS[preset]))
