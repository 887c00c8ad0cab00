"""A plugin for vLLM: its attention writes and reads the cache with this package's kernels.

vLLM finds it once this package is installed beside it, and it does nothing unless asked::

    KVCACHE_DPEX_VLLM=1 vllm serve MODEL --kv-cache-dtype int8_per_token_head

On the CPU it takes the place of vLLM's backend ``CPU_ATTN``, the only one that vLLM offers there. On Intel
GPUs it takes the place of ``TRITON_ATTN``, to be chosen with ``--attention-backend TRITON_ATTN``; that is
written from vLLM's sources and has not been run.
"""

from __future__ import annotations

import os

VARIABLE = "KVCACHE_DPEX_VLLM"


def register() -> None:
    """Register the backends where ``KVCACHE_DPEX_VLLM=1`` asks for it; vLLM's entry point.

    Raises
    ------
    ValueError
        The variable is neither ``"0"`` nor ``"1"``.
    """
    asked = os.environ.get(VARIABLE, "0")
    if asked not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {asked!r}")
    if asked == "0":
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.backend.CpuBackend")
    register_backend(AttentionBackendEnum.TRITON_ATTN, f"{__name__}.backend.XpuBackend")
