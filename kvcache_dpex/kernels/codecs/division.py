"""Scales and quotients rounded as IEEE 754 asks, also where a device divides less accurately.

OpenCL allows 2.5 units in the last place. A quotient is corrected by its remainder, which gives the nearest
float32 where the inverse is the nearest one (Markstein, "IA-64 and Elementary Functions", 2000, chapter 8).
"""

import numpy as np

from ..intrinsics import abs_bits, clamp, divide, float_from_bits, fma
from ..vectors import each

INFINITY = np.int32(0x7F800000)
NAN = np.int32(0x7FC00000)
# Rows below 2**-60 are multiplied by 2**100, exactly, so that remainders and reciprocals are normal numbers.
SMALL = np.int32(0x21800000)
LIFT = np.float32(2.0**100)
TO_LEAST = np.float32(2.0**49)  # LIFT * TO_LEAST makes the least float32 1
MANTISSA = np.int32(0x007FFFFF)
EXPONENT = np.int32(0x7F800000)
AFTER_POWER = np.int32(0x7E800001)
ONE = np.float32(1.0)
ZERO = np.float32(0.0)


def row_scale(absmax, limit, odd, inverse_odd, power, tiny):
    """``absmax / limit``, where ``limit = odd / power`` and `power` is a power of two.

    Of rows whose absmax is below `tiny`, scales may be subnormal. Infinity gives infinity, and NaN NaN.
    """
    if absmax >= INFINITY:
        scale = float_from_bits(INFINITY if absmax == INFINITY else NAN)
    elif absmax < tiny:
        scale = subnormal_scale(absmax, limit)
    else:
        number = float_from_bits(absmax)
        scale = quotient_of(number, odd, inverse_odd) * power
    return scale


def subnormal_scale(absmax, limit):
    """``absmax / limit`` as a whole number of the least float32, ties to even."""
    divisor = np.uint32(limit)
    leasts = np.uint32(float_from_bits(absmax) * LIFT * TO_LEAST)
    whole = np.uint32(leasts // divisor)
    twice_rest = np.uint32(2) * np.uint32(leasts - whole * divisor)
    above = twice_rest > divisor or (twice_rest == divisor and (whole & np.uint32(1)) == 1)
    return float_from_bits(np.int32(whole + np.uint32(above)))


def row_quotients(x, absmax, scale, limit):
    """Values of a row divided by its scale, within ``[-limit, limit]``; 0 for rows that are not finite."""
    divisor = divisor_of(absmax, scale)
    inverse = inverse_of(absmax, divisor)
    if absmax < SMALL or absmax >= INFINITY:
        x = each(lifted, x, limit * divisor if absmax < SMALL else ZERO)
    return each(quotient_of, x, divisor, inverse)


def divisor_of(absmax, scale):
    """What the values of a row are divided by; see `lifted`."""
    if absmax < SMALL:
        return scale * LIFT
    return ONE if absmax >= INFINITY else scale


def lifted(x, limit):
    """A value of a small row times 2**100. A subnormal scale is inexact, so `limit` is enforced."""
    return clamp(x * LIFT, limit)


def inverse_of(absmax, divisor):
    """The float32 nearest to ``1 / divisor``; 0 where every code of the row is 0."""
    if divisor == ZERO or absmax >= INFINITY:
        return ZERO
    return nearest_inverse(divisor)


def nearest_inverse(divisor):
    """The float32 nearest to ``1 / divisor``, where both are normal numbers."""
    bits = abs_bits(divisor)
    if (bits & MANTISSA) == MANTISSA:
        # The number after a power of two is nearest; Newton's steps would stop at the power.
        return float_from_bits(AFTER_POWER - (bits & EXPONENT))
    return nearer_inverse(divisor, nearer_inverse(divisor, divide(ONE, divisor)))


def nearer_inverse(divisor, inverse):
    """One step of Newton's iteration."""
    return fma(fma(-divisor, inverse, ONE), inverse, inverse)


def quotient_of(value, divisor, inverse):
    """``value / divisor`` in float32, rounded to nearest."""
    quotient = value * inverse
    return fma(fma(-quotient, divisor, value), inverse, quotient)


def scaled(value, scale):
    """``value * scale``; NaN where the scale is not finite, with the same bits on every device."""
    return value * scale if abs_bits(scale) < INFINITY else float_from_bits(NAN)
