"""exp2, log2 and tanh in float32 from fma and integer arithmetic alone: the same bits on every device.

The coefficients are Chebyshev interpolants of ``(exp2(x) - 1) / x``, ``log2(1 + x) / x`` and
``(tanh(x) / x - 1) / x**2`` on the ranges given below.
"""

import numpy as np

from .codecs.division import inverse_of
from .intrinsics import abs_bits, float_bits, float_from_bits, fma, rint_i32

ONE, TWO, ZERO = np.float32(1.0), np.float32(2.0), np.float32(0.0)
LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
NO_ROW = np.int32(0)
LEAST = np.float32(-126.0)  # the least exponent of normal numbers
ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even
# On [-0.5, 0.5], within 2e-9.
E1, E2, E3 = np.float32(0.69314718), np.float32(0.24022651), np.float32(0.05550357)
E4, E5, E6 = np.float32(0.009618057), np.float32(0.0013390867), np.float32(0.00015461448)
# On [sqrt(1/2) - 1, sqrt(2) - 1], within 3e-8.
ROOT_HALF = np.int32(0x3F3504F3)
MANTISSA = np.int32(0x007FFFFF)
L0, L1, L2 = np.float32(1.442695), np.float32(-0.72134733), np.float32(0.4809106)
L3, L4, L5 = np.float32(-0.36070484), np.float32(0.28791833), np.float32(-0.2389203)
L6, L7, L8 = np.float32(0.21566986), np.float32(-0.20742103), np.float32(0.12614846)
# On [-0.625, 0.625], within 2e-8.
SMALL = np.int32(0x3F200000)
T0, T1, T2 = np.float32(-0.33333328), np.float32(0.13332783), np.float32(-0.0538525)
T3, T4 = np.float32(0.02100364), np.float32(-0.006104946)
TANH_IS_ONE = np.float32(20.0)


def exp2(x):
    """``2**x`` for x of at most 127, within 1 unit in the last place; 0 below 2**-126, NaN for NaN."""
    whole = (x + ROUND) - ROUND
    part = x - whole
    p = fma(fma(fma(fma(fma(E6, part, E5), part, E4), part, E3), part, E2), part, E1)
    power = float_from_bits(np.int32((rint_i32(x) + np.int32(127)) << np.int32(23)))
    return ZERO if x < LEAST else fma(p, part, ONE) * power


def log2(x):
    """Base-2 logarithm of a positive normal number, within 2e-7 or 2 units in the last place."""
    bits = float_bits(x)
    exponent = np.int32((bits - ROOT_HALF) >> np.int32(23))
    f = float_from_bits(np.int32(bits - (exponent << np.int32(23)))) - ONE
    p = fma(fma(fma(fma(L8, f, L7), f, L6), f, L5), f, L4)
    p = fma(fma(fma(fma(p, f, L3), f, L2), f, L1), f, L0)
    return fma(p, f, np.float32(exponent))


def tanh(x):
    """Hyperbolic tangent, within 4 units in the last place."""
    square = x * x
    p = fma(fma(fma(fma(T4, square, T3), square, T2), square, T1), square, T0)
    near_zero = fma(p * square, x, x)
    magnitude = float_from_bits(abs_bits(x))
    power = exp2(TWO * LOG2_E * (TANH_IS_ONE if magnitude > TANH_IS_ONE else magnitude))
    far = fma(-TWO, inverse_of(NO_ROW, power + ONE), ONE)
    far = -far if x < ZERO else far
    return near_zero if abs_bits(x) < SMALL else far
