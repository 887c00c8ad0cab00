"""Values as they are: float32, float16 and bfloat16, which views make float32. Rows have no scales."""

import numpy as np


def scale_at(scales, block, offset, head):
    """1; nothing is read."""
    return np.float32(1.0)


def value_of(code, scale):
    """The value itself."""
    return code
