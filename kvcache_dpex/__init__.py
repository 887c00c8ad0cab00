"""A paged KV cache for Intel GPUs in pure Python.

Operations and submodules are loaded when they are first used, so importing the package needs no device and
no other package. `kvcache_dpex.torch` has the same operations for torch tensors.
"""

from importlib import import_module

from .runtime.environment import watch

TYPE_CHECKING = False  # importing typing would double the time of this import
if TYPE_CHECKING:
    from typing import Any

    from .blocks.cache import PagedCache as PagedCache
    from .blocks.inventory import OutOfBlocks as OutOfBlocks
    from .blocks.pool import BlockPool as BlockPool
    from .ops.allocate import empty_cache as empty_cache
    from .ops.allocate import empty_quant_cache as empty_quant_cache
    from .ops.attention import paged_attention as paged_attention
    from .ops.blocks import copy_blocks as copy_blocks
    from .ops.blocks import gather_blocks as gather_blocks
    from .ops.blocks import swap_blocks as swap_blocks
    from .ops.blocks import zero_blocks as zero_blocks
    from .ops.cast import reshape_and_cache_fp8 as reshape_and_cache_fp8
    from .ops.dequantize import dequant_cache as dequant_cache
    from .ops.dequantize import dequant_caches as dequant_caches
    from .ops.merge import merge_attention_states as merge_attention_states
    from .ops.moves import move_blocks as move_blocks
    from .ops.own_kernel import launch_kernel as launch_kernel
    from .ops.quantize import reshape_and_cache_quant as reshape_and_cache_quant
    from .ops.rotary import rotary_and_cache as rotary_and_cache
    from .ops.slots import get_batch_indices_positions as get_batch_indices_positions
    from .ops.slots import slot_mapping as slot_mapping
    from .ops.spellings import append_paged_kv_cache as append_paged_kv_cache
    from .ops.spellings import concat_and_cache_mla as concat_and_cache_mla
    from .ops.write import reshape_and_cache as reshape_and_cache
    from .runtime.compile.errors import KernelError as KernelError
    from .runtime.compile.simulate import simulate as simulate

__version__ = "0.1.0"

_HOMES = {
    "BlockPool": ".blocks.pool",
    "KernelError": ".runtime.compile.errors",
    "OutOfBlocks": ".blocks.inventory",
    "PagedCache": ".blocks.cache",
    "append_paged_kv_cache": ".ops.spellings",
    "concat_and_cache_mla": ".ops.spellings",
    "copy_blocks": ".ops.blocks",
    "dequant_cache": ".ops.dequantize",
    "dequant_caches": ".ops.dequantize",
    "empty_cache": ".ops.allocate",
    "empty_quant_cache": ".ops.allocate",
    "gather_blocks": ".ops.blocks",
    "get_batch_indices_positions": ".ops.slots",
    "launch_kernel": ".ops.own_kernel",
    "merge_attention_states": ".ops.merge",
    "move_blocks": ".ops.moves",
    "paged_attention": ".ops.attention",
    "reshape_and_cache": ".ops.write",
    "reshape_and_cache_fp8": ".ops.cast",
    "reshape_and_cache_quant": ".ops.quantize",
    "rotary_and_cache": ".ops.rotary",
    "simulate": ".runtime.compile.simulate",
    "slot_mapping": ".ops.slots",
    "swap_blocks": ".ops.blocks",
    "zero_blocks": ".ops.blocks",
}
__all__ = list(_HOMES)
_MODULES = ("layout", "reference", "torch")

watch.start()


def __getattr__(name: str) -> "Any":
    if name in _MODULES:
        return _module(name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value  # asked for once: the look-up would cost as much as a launch
    return value


def _module(name: str) -> "Any":
    try:
        return import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        # An AttributeError, so that hasattr and help() work without torch.
        raise AttributeError(
            f"{__name__}.{name} needs {error.name}, which is not installed: pip install {error.name}"
        ) from None


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))])
