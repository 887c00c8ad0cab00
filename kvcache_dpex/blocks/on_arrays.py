"""The operations that a `PagedCache` calls, on dpnp arrays."""

from ..ops.allocate import empty_cache as empty_cache
from ..ops.allocate import empty_quant_cache as empty_quant_cache
from ..ops.attention import paged_attention as paged_attention
from ..ops.blocks import copy_blocks as copy_blocks
from ..ops.blocks import gather_blocks as gather_blocks
from ..ops.blocks import swap_blocks as swap_blocks
from ..ops.dequantize import dequant_cache as dequant_cache
from ..ops.quantize import reshape_and_cache_quant as reshape_and_cache_quant
from ..ops.write import reshape_and_cache as reshape_and_cache
