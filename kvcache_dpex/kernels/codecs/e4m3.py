"""fp8 (e4m3fn: 4 bits of exponent, 3 of mantissa): ``scale = absmax / 448``, ``code = e4m3(x / scale)``."""

import numpy as np

from ..intrinsics import float_from_bits
from ..vectors import each
from ..views import load
from .division import NAN, row_quotients, row_scale, scaled
from .float8 import NAN_CODE, nearest_code, number_of, quotients_by

LIMIT = np.float32(448.0)  # the largest number
ODD, INVERSE_ODD, POWER = np.float32(7.0), np.float32(1.0 / 7.0), np.float32(1.0 / 64.0)
TINY = np.int32(0x04E00000)  # 448 * 2**-126; below it scales are subnormal
NORMAL = np.int32(0x3C800000)  # 2**-6; smaller numbers are multiples of 2**-9
STEPS, STEPS_BITS = np.float32(2.0**14), np.uint32(0x46800000)  # float32 from 2**14 on has steps of 2**-9
SHIFT, REBIAS = np.uint32(20), np.uint32(120 << 3)
LEAST_NORMAL, LARGEST_CODE = np.uint32(0x08), np.uint32(0x7E)


def scale_at(scales, block, offset, head):
    """The scale of a row of a cache."""
    return load(scales, block, offset, head)


def scale_of(absmax):
    """``absmax / 448``; the absmax of a row that is not finite."""
    return row_scale(absmax, LIMIT, ODD, INVERSE_ODD, POWER, TINY)


def code_of(x):
    """The e4m3fn nearest to a float32, ties to even, at most 448 in magnitude; NaN stays NaN."""
    return nearest_code(x, SHIFT, REBIAS, NORMAL, STEPS, STEPS_BITS, LARGEST_CODE)


def codes_of(x, absmax, scale):
    """``e4m3(x / scale)`` for each value."""
    return each(code_of, row_quotients(x, absmax, scale, LIMIT))


def codes_by(x, scale):
    """``e4m3(x / scale)`` for each value, by a scale that was not made for them."""
    return each(code_of, quotients_by(x, scale, LIMIT))


def value_of(code, scale):
    """The float32 of an e4m3fn code, times the scale."""
    magnitude = np.uint32(code) & np.uint32(0x7F)
    number = number_of(magnitude, SHIFT, REBIAS, LEAST_NORMAL, STEPS, STEPS_BITS)
    value = scaled(-number if code >= 0x80 else number, scale)
    return float_from_bits(NAN) if magnitude == NAN_CODE else value
