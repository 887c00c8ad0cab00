"""The oracle: every public operation again, on NumPy arrays, in loops that a reader believes at once.

Same names, same argument order, same in-place semantics as the package's operations. Where slots
repeat, the last row wins here; the device leaves the winner open.
"""

from .blocks import *  # noqa: F403
from .codes import *  # noqa: F403
from .rows import *  # noqa: F403
