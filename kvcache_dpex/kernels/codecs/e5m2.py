"""fp8 (e5m2: 5 bits of exponent, 2 of mantissa) with a scale that is given: ``code = e5m2(x / scale)``."""

import numpy as np

from ..intrinsics import float_from_bits
from ..vectors import each
from ..views import load
from .division import INFINITY, NAN, scaled
from .float8 import nearest_code, number_of, quotients_by

LIMIT = np.float32(57344.0)  # the largest number
NORMAL = np.int32(0x38800000)  # 2**-14; smaller numbers are multiples of 2**-16
STEPS, STEPS_BITS = np.float32(2.0**7), np.uint32(0x43000000)  # float32 from 2**7 on has steps of 2**-16
SHIFT, REBIAS = np.uint32(21), np.uint32(112 << 2)
LEAST_NORMAL, LARGEST_CODE, INFINITE_CODE = np.uint32(0x04), np.uint32(0x7B), np.uint32(0x7C)


def scale_at(scales, block, offset, head):
    """The scale of a row of a cache."""
    return load(scales, block, offset, head)


def code_of(x):
    """The e5m2 nearest to a float32, ties to even, at most 57344 in magnitude; NaN stays NaN."""
    return nearest_code(x, SHIFT, REBIAS, NORMAL, STEPS, STEPS_BITS, LARGEST_CODE)


def codes_by(x, scale):
    """``e5m2(x / scale)`` for each value."""
    return each(code_of, quotients_by(x, scale, LIMIT))


def value_of(code, scale):
    """The float32 of an e5m2 code, times the scale."""
    magnitude = np.uint32(code) & np.uint32(0x7F)
    number = number_of(magnitude, SHIFT, REBIAS, LEAST_NORMAL, STEPS, STEPS_BITS)
    if magnitude == INFINITE_CODE:
        number = float_from_bits(INFINITY)
    value = scaled(-number if code >= 0x80 else number, scale)
    return float_from_bits(NAN) if magnitude > INFINITE_CODE else value
