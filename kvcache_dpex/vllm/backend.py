"""vLLM's attention over `kvcache_dpex.torch`, in vLLM's memory, where scales lie behind their codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from .. import formats
from .. import torch as kv

_PLAIN = ("auto", "float16", "bfloat16")
_SCALE_BYTES = 4


class Caches(NamedTuple):
    """Views of a layer's memory."""

    key_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor
    key_scales: Tensor | None = None  # [num_blocks, block_size, num_kv_heads]
    value_scales: Tensor | None = None


def caches_of(kv_cache: Tensor, head_size: int, kv_cache_dtype: str) -> Caches:
    """What lies in the memory that vLLM hands a layer.

    Parameters
    ----------
    kv_cache : [num_blocks, num_kv_heads, block_size, content], of any strides
        For each token and head a key and a value, or ``[key codes, scale, value codes, scale]`` with float32
        scales where a format has them for each token and head.
    head_size
        Of the keys.
    kv_cache_dtype
        vLLM's name of the format.
    """
    rows = kv_cache.transpose(1, 2)
    if kv_cache_dtype not in formats.QUANTIZED:
        return Caches(rows[..., :head_size], rows[..., head_size:])
    keys, values = rows.split([head_size + _SCALE_BYTES, rows.shape[-1] - head_size - _SCALE_BYTES], dim=-1)
    scales = [half[..., -_SCALE_BYTES:].view(torch.float32)[..., 0] for half in (keys, values)]
    return Caches(keys[..., :-_SCALE_BYTES], values[..., :-_SCALE_BYTES], *scales)


@dataclass
class Metadata(AttentionMetadata):
    """One batch, as `kvcache_dpex.torch.paged_attention` takes it."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        if common_attn_metadata.causal is not True:
            raise NotImplementedError(
                "kvcache_dpex attends causally, and this model asks for attention that is not; unset "
                "KVCACHE_DPEX_VLLM"
            )
        return Metadata(
            common_attn_metadata.num_actual_tokens,
            common_attn_metadata.query_start_loc,
            common_attn_metadata.seq_lens,
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.slot_mapping,
        )


class Impl(AttentionImpl[Metadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        _refuse("kv_cache_dtype", kv_cache_dtype, kv_cache_dtype in Backend.supported_kv_cache_dtypes)
        _refuse("attn_type", attn_type, attn_type == AttentionType.DECODER)
        _refuse("alibi_slopes", alibi_slopes, alibi_slopes is None)
        for name, value in others.items():
            _refuse(name, value, value in (None, False, -1))
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.options: dict[str, Any] = {
            "scale": self.scale,
            "sliding_window": sliding_window,
            "soft_cap": logits_soft_cap or None,
            "format": None
            if kv_cache_dtype in _PLAIN
            else formats.VLLM_STATIC.get(kv_cache_dtype, kv_cache_dtype),
        }

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a batch's keys and values."""
        scales: Any
        key_cache, value_cache, *scales = self._caches(layer, kv_cache)
        key, value = key[: len(slot_mapping)], value[: len(slot_mapping)]
        if self.options["format"] is None:
            kv.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        else:
            kv.reshape_and_cache_flash(
                key, value, key_cache, value_cache, slot_mapping, self.kv_cache_dtype, *scales
            )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; the batch's own keys and values are in the cache already."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvcache_dpex does not quantize its output; disable that fusion")
        if attn_metadata is None:  # vLLM measures how much memory a step takes
            return output
        caches = self._caches(layer, kv_cache)
        num_tokens = attn_metadata.num_actual_tokens
        shape = num_tokens, self.num_heads, caches.value_cache.shape[-1]
        kv.paged_attention(
            query[:num_tokens].view(num_tokens, self.num_heads, self.head_size),
            caches.key_cache,
            caches.value_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            query_start_loc=attn_metadata.query_start_loc,
            key_scales=caches.key_scales,
            value_scales=caches.value_scales,
            sinks=None if self.sinks is None else self.sinks.float(),
            out=output[:num_tokens].view(shape),
            **self.options,
        )
        return output

    def _caches(self, layer: Any, kv_cache: Tensor) -> Caches:
        caches = caches_of(kv_cache, self.head_size, self.kv_cache_dtype)
        if self.kv_cache_dtype in formats.VLLM_STATIC:
            return caches._replace(key_scales=layer._k_scale, value_scales=layer._v_scale)
        return caches


def _refuse(name: str, value: Any, supported: bool) -> None:
    if not supported:
        raise NotImplementedError(
            f"kvcache_dpex does not support {name}={value!r}; unset KVCACHE_DPEX_VLLM or change the option"
        )


class Backend(AttentionBackend):
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = [*_PLAIN, *formats.QUANTIZED, *formats.VLLM_STATIC]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Make room for the scales behind the codes."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        content = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize + 2 * _SCALE_BYTES
        return replace(spec, state_content_bytes=content)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder


class CpuBackend(Backend):
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


class XpuBackend(Backend):
    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"
