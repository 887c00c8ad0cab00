"""Block management: pools, which are pure Python without arrays, and `cache.PagedCache`, which has arrays."""

from .hashing import block_hashes as block_hashes
from .inventory import OutOfBlocks as OutOfBlocks
from .inventory import PoolStats as PoolStats
from .pool import BlockPool as BlockPool
