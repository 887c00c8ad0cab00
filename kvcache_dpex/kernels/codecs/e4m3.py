"""fp8 (e4m3fn: 4 bits of exponent, 3 of mantissa): ``scale = absmax / 448``, ``code = e4m3(x / scale)``.

Integer and float32 arithmetic only: few devices have instructions for fp8.
"""

import numpy as np

from ..intrinsics import abs_bits, float_bits, float_from_bits
from ..vectors import each
from ..views import load
from .division import INFINITY, NAN, row_quotients, row_scale, scaled

LIMIT = np.float32(448.0)  # the largest number
ODD, INVERSE_ODD, POWER = np.float32(7.0), np.float32(1.0 / 7.0), np.float32(1.0 / 64.0)
TINY = np.int32(0x04E00000)  # 448 * 2**-126; below it scales are subnormal
NORMAL = np.int32(0x3C800000)  # 2**-6; smaller numbers are multiples of 2**-9
# float32 from 2**14 on has steps of 2**-9: adding it rounds, and the low bits are the number of steps.
STEPS = np.float32(2.0**14)
STEPS_BITS = np.uint32(0x46800000)
REBIAS = np.uint32(120 << 3)
LARGEST_CODE, NAN_CODE = np.uint32(0x7E), np.uint32(0x7F)


def scale_at(scales, block, offset, head):
    """The scale of a row of a cache."""
    return load(scales, block, offset, head)


def scale_of(absmax):
    """``absmax / 448``; the absmax of a row that is not finite."""
    return row_scale(absmax, LIMIT, ODD, INVERSE_ODD, POWER, TINY)


def code_of(x):
    """The e4m3fn nearest to a float32, ties to even, at most 448 in magnitude; NaN stays NaN."""
    magnitude = abs_bits(x)
    bits = np.uint32(magnitude)
    even = np.uint32(np.uint32(bits >> np.uint32(20)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFFF)) + even)
    code = min(np.uint32(np.uint32(rounded >> np.uint32(20)) - REBIAS), LARGEST_CODE)
    if magnitude < NORMAL:
        code = np.uint32(np.uint32(float_bits(float_from_bits(magnitude) + STEPS)) - STEPS_BITS)
    if magnitude > INFINITY:
        code = NAN_CODE
    sign = np.uint32(np.uint32(np.uint32(float_bits(x)) >> np.uint32(24)) & np.uint32(0x80))
    return np.uint8(code | sign)


def codes_of(x, absmax, scale):
    """``e4m3(x / scale)`` for each value."""
    return each(code_of, row_quotients(x, absmax, scale, LIMIT))


def value_of(code, scale):
    """The float32 of an e4m3fn code, times the scale."""
    magnitude = np.uint32(code) & np.uint32(0x7F)
    if magnitude < 8:
        number = float_from_bits(np.int32(STEPS_BITS | magnitude)) - STEPS
    else:
        number = float_from_bits(np.int32((magnitude + REBIAS) << np.uint32(20)))
    value = scaled(-number if code >= 0x80 else number, scale)
    return float_from_bits(NAN) if magnitude == NAN_CODE else value
