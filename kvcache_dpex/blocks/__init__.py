"""Block management: pure Python, without arrays."""

from .hashing import block_hashes as block_hashes
from .inventory import OutOfBlocks as OutOfBlocks
from .inventory import PoolStats as PoolStats
from .pool import BlockPool as BlockPool
