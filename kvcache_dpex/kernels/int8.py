"""The arithmetic of the int8 cache, which every kernel that quantizes shares.

``scale = absmax / 127`` and ``code = clamp(rint(x / scale), -127, 127)`` with quotients rounded as
IEEE 754 asks, on devices whose own division may be off by 2.5 units in the last place: a quotient is
corrected by its remainder, which is right where the inverse is (Markstein, "IA-64 and Elementary
Functions", 2000, chapter 8).
"""

import numpy as np

from . import device

INFINITY = np.int32(0x7F800000)
NAN = np.int32(0x7FC00000)
# Rows below 2**-60 are lifted by 2**100, exactly, so that no remainder and no reciprocal leaves float32.
SMALL = np.int32(0x21800000)
LIFT = np.float32(2.0**100)
# Below 127 * 2**-126 a scale is a whole number of the least float32; it is then worked out as one.
TINY = np.int32(0x047E0000)
LEAST = np.float32(2.0**49)
MANTISSA = np.int32(0x007FFFFF)
EXPONENT = np.int32(0x7F800000)
AFTER_POWER = np.int32(0x7E800001)
ONE = np.float32(1.0)
ZERO = np.float32(0.0)
LIMIT = np.float32(127.0)
NO_CODES = np.uint32(0)
INVERSE_LIMIT = np.float32(1.0 / 127.0)


def scale_of(absmax):
    """Scale of a row whose largest magnitude has these bits; the non-finite ones stand for themselves."""
    if absmax >= INFINITY:
        scale = device.number(INFINITY if absmax == INFINITY else NAN)
    elif absmax < TINY:
        leasts = np.uint32(device.number(absmax) * LIFT * LEAST)
        twice = np.uint32(np.uint32(2) * leasts + np.uint32(127))
        scale = device.number(np.int32(twice // np.uint32(254)))
    else:
        number = device.number(absmax)
        quotient = number * INVERSE_LIMIT
        remainder = device.fma(-quotient, LIMIT, number)
        scale = device.fma(remainder, INVERSE_LIMIT, quotient)
    return scale


def divisor_of(absmax, scale):
    """What a row's values are divided by: its scale, lifted where they are, or 1 where they are cleared."""
    if absmax < SMALL:
        return scale * LIFT
    return ONE if absmax >= INFINITY else scale


def inverse_of(absmax, divisor):
    """``1 / divisor``, rounded to nearest; 0 where every code of the row is 0."""
    if divisor == ZERO or absmax >= INFINITY:
        return ZERO
    bits = device.magnitude(divisor)
    if (bits & MANTISSA) == MANTISSA:
        # The number after a power of two is nearest; the steps below would stop at that power.
        return device.number(AFTER_POWER - (bits & EXPONENT))
    return nearer_inverse(divisor, nearer_inverse(divisor, device.divide(ONE, divisor)))


def nearer_inverse(divisor, inverse):
    """One of Newton's steps."""
    return device.fma(device.fma(-divisor, inverse, ONE), inverse, inverse)


def quotient_of(value, divisor, inverse):
    """``value / divisor``, rounded to nearest; one correction is enough beside every tie of a code."""
    quotient = value * inverse
    return device.fma(device.fma(-quotient, divisor, value), inverse, quotient)


def is_special(absmax):
    """Whether a row's values must be `lifted` before they are divided."""
    return absmax < SMALL or absmax >= INFINITY


def limit_of(absmax, divisor):
    """How far from 0 a lifted value may be: 0 clears a row that is not finite."""
    return LIMIT * divisor if absmax < SMALL else ZERO


def lifted(x, limit):
    """A value of a small row, lifted. A scale that lost bits is met by no more than 127 of it."""
    return device.limited(x * LIFT, limit)


def lifted4(a, b, c, d, limit):
    """`lifted` of four values."""
    return lifted(a, limit), lifted(b, limit), lifted(c, limit), lifted(d, limit)


def code_of(x, divisor, inverse):
    """The code of a value, as int8."""
    return device.code(device.nearest(quotient_of(x, divisor, inverse)))


def largest4(a, b, c, d):
    """Bits of the largest of four magnitudes."""
    first = device.larger(device.magnitude(a), device.magnitude(b))
    return device.larger(first, device.larger(device.magnitude(c), device.magnitude(d)))


def codes4(a, b, c, d, divisor, inverse):
    """The codes of four values, in one word; see `code_of`."""
    return device.pack4(
        device.nearest(quotient_of(a, divisor, inverse)),
        device.nearest(quotient_of(b, divisor, inverse)),
        device.nearest(quotient_of(c, divisor, inverse)),
        device.nearest(quotient_of(d, divisor, inverse)),
    )


def load16(pointer, eight, lanes):
    """Two eights of a row, `lanes` eights apart, so that neighbouring lanes read neighbouring eights."""
    return device.load8(pointer, 8 * eight) + device.load8(pointer, 8 * (eight + lanes))


def largest16(x):
    """Bits of the largest of sixteen magnitudes."""
    first = device.larger(largest4(x[0], x[1], x[2], x[3]), largest4(x[4], x[5], x[6], x[7]))
    return device.larger(
        first, device.larger(largest4(x[8], x[9], x[10], x[11]), largest4(x[12], x[13], x[14], x[15]))
    )


def lifted16(x, limit):
    """`lifted` of sixteen values."""
    return (
        lifted4(x[0], x[1], x[2], x[3], limit)
        + lifted4(x[4], x[5], x[6], x[7], limit)
        + lifted4(x[8], x[9], x[10], x[11], limit)
        + lifted4(x[12], x[13], x[14], x[15], limit)
    )


def put16(codes, eight, lanes, x, absmax, scale):
    """The codes of `load16`'s values, where it found them."""
    divisor = divisor_of(absmax, scale)
    inverse = inverse_of(absmax, divisor)
    if is_special(absmax):
        x = lifted16(x, limit_of(absmax, divisor))
    low = codes4(x[0], x[1], x[2], x[3], divisor, inverse)
    high = codes4(x[4], x[5], x[6], x[7], divisor, inverse)
    device.store_pair(codes, 2 * eight, low, high)
    low = codes4(x[8], x[9], x[10], x[11], divisor, inverse)
    high = codes4(x[12], x[13], x[14], x[15], divisor, inverse)
    device.store_pair(codes, 2 * (eight + lanes), low, high)


def decoded(code, scale):
    """``code * scale``; NaN for every code of a row whose scale is not finite, the same on every device."""
    return code * scale if device.magnitude(scale) < INFINITY else device.number(NAN)


def decoded4(word, scale):
    """`decoded` of the four codes in a word."""
    a, b, c, d = device.unpack4(word)
    return decoded(a, scale), decoded(b, scale), decoded(c, scale), decoded(d, scale)
