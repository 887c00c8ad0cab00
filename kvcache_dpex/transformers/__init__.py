"""A paged, quantized cache for ``model.generate`` of Hugging Face transformers.

    >>> from kvcache_dpex.transformers import PagedCache  # doctest: +SKIP
    >>> model.set_attn_implementation("kvcache_dpex")  # doctest: +SKIP
    >>> cache = PagedCache(model.config, format="int8_per_token_head")  # doctest: +SKIP
    >>> model.generate(**inputs, cache=cache)  # doctest: +SKIP

With ``attn_implementation="kvcache_dpex"``, which importing this module registers, attention reads the blocks
in place. With any other attention the cache hands out gathered (and decoded) keys and values, as it does for
models that change them after the cache. `StaticPagedCache` is for compiled forward passes, `quantized_pool`
for continuous batching.
"""

from .attention import register
from .batching import QuantizedPool, quantized_pool
from .cache import PagedCache
from .static import StaticPagedCache

__all__ = ["PagedCache", "QuantizedPool", "StaticPagedCache", "quantized_pool"]

register()
