"""Float32 to 8-bit floats and back, by integer and float32 arithmetic: few devices have instructions for it.

A code is a sign, an exponent and a mantissa as in float32, with another bias; the smallest codes are numbers
of equal steps.
"""

import numpy as np

from ..intrinsics import abs_bits, clamp, float_bits, float_from_bits
from ..vectors import each
from .division import EXPONENT, INFINITY, NAN, nearest_inverse, quotient_of

SIGN = np.int32(-(2**31))
LEAST_NORMAL = np.int32(0x00800000)
MOST_SCALE = np.int32(0x7F000000)  # 2**127, whose inverse is no normal number
TWICE_BIAS = np.int32(0x7F000000)
NAN_CODE = np.uint32(0x7F)


def nearest_code(x, shift, rebias, normal, steps, steps_bits, largest):
    """The code nearest to a float32, ties to even, at most `largest` in magnitude; NaN stays NaN.

    A code has `shift` bits of mantissa less than a float32, and `rebias` is the difference of the biases at
    the place of its exponent. Numbers below `normal` are multiples of a step: `steps` is the power of two
    from which on these are the steps of float32, so that adding it rounds.
    """
    magnitude = abs_bits(x)
    bits = np.uint32(magnitude)
    even = np.uint32(np.uint32(bits >> shift) & np.uint32(1))
    half = np.uint32(np.uint32(np.uint32(1) << np.uint32(shift - np.uint32(1))) - np.uint32(1))
    rounded = np.uint32(np.uint32(bits + half) + even)
    code = min(np.uint32(np.uint32(rounded >> shift) - rebias), largest)
    if magnitude < normal:
        code = np.uint32(np.uint32(float_bits(float_from_bits(magnitude) + steps)) - steps_bits)
    if magnitude > INFINITY:
        code = NAN_CODE
    sign = np.uint32(np.uint32(np.uint32(float_bits(x)) >> np.uint32(24)) & np.uint32(0x80))
    return np.uint8(code | sign)


def number_of(magnitude, shift, rebias, least_normal, steps, steps_bits):
    """The float32 of a finite code without its sign; those below `least_normal` count steps."""
    if magnitude < least_normal:
        number = float_from_bits(np.int32(steps_bits | magnitude)) - steps
    else:
        number = float_from_bits(np.int32((magnitude + rebias) << shift))
    return number


def quotients_by(x, scale, limit):
    """``x / scale`` for each value, within ``[-limit, limit]``; the sign of zero is kept, and NaN.

    NaN for a scale that is not positive, is subnormal, or is 2**127 or more.
    """
    bits = float_bits(scale)
    power = float_from_bits(np.int32(TWICE_BIAS - np.int32(bits & EXPONENT)))  # makes scales 1 to 2, exactly
    if bits < LEAST_NORMAL or bits >= MOST_SCALE:
        power = float_from_bits(NAN)
    divisor = scale * power
    return each(quotient_by, x, power, divisor, nearest_inverse(divisor), limit * divisor)


def quotient_by(x, power, divisor, inverse, most):
    """``x * power / divisor``, at most that of `most`."""
    lifted = x * power
    magnitude = abs_bits(quotient_of(clamp(lifted, most), divisor, inverse))
    if abs_bits(lifted) > INFINITY:
        magnitude = NAN
    return float_from_bits(np.int32(magnitude | np.int32(float_bits(x) & SIGN)))
