"""int8: ``scale = absmax / 127``, ``code = clamp(rint(x / scale), -127, 127)``."""

import numpy as np

from ..intrinsics import float_from_int8, rint_i32, to_int8
from ..vectors import each
from ..views import load
from .division import ONE, row_quotients, row_scale, scaled

LIMIT = np.float32(127.0)
INVERSE_LIMIT = np.float32(1.0 / 127.0)
TINY = np.int32(0x047E0000)  # 127 * 2**-125; below 127 * 2**-126 scales are subnormal


def scale_at(scales, block, offset, head):
    """The scale of a row of a cache."""
    return load(scales, block, offset, head)


def scale_of(absmax):
    """``absmax / 127``; the absmax of a row that is not finite."""
    return row_scale(absmax, LIMIT, LIMIT, INVERSE_LIMIT, ONE, TINY)


def code_of(quotient):
    """The nearest int8, ties to even."""
    return to_int8(rint_i32(quotient))


def codes_of(x, absmax, scale):
    """``clamp(rint(x / scale), -127, 127)`` for each value."""
    return each(code_of, row_quotients(x, absmax, scale, LIMIT))


def value_of(code, scale):
    """``code * scale``."""
    return scaled(float_from_int8(code), scale)
