"""The steps of an online softmax: scores in units of log2, relative to the largest one so far."""

import numpy as np

from .codecs import codec_of
from .intrinsics import float_from_bits, fma, get_local
from .transcendental import tanh
from .views import load

ZERO = np.float32(0.0)
NO_SCORE = np.float32(-np.inf)
LOWEST = np.float32(-3.0e38)  # finite, so that NO_SCORE - LOWEST is a number


def dot(q, k, scale, size):
    """``q @ (k * scale)``, one product after the other."""
    codec = codec_of(k)
    total = ZERO
    for element in range(size):
        total = fma(load(q, element), codec.value_of(load(k, element), scale), total)
    return total


def score_of(product, scale, cap):
    """The score of a scaled dot product; with a soft cap, `cap` times its tanh."""
    return tanh(product * scale) * cap if cap > ZERO else product * scale


def max_f32(a, b):
    """The larger of two float32; `a` where either is NaN."""
    return b if b > a else a


def largest_local(count, largest):
    """The largest of the float32 in the work-group's local memory, and of one more."""
    for n in range(count):
        largest = max_f32(largest, float_from_bits(get_local(n)))
    return largest


def times(value, factor):
    return value * factor


def plus_weighted(total, value, weight):
    return fma(weight, value, total)


def plus_where_weighted(total, value, weight):
    """A weight of 0 adds nothing, not even where the value is infinite or NaN."""
    return fma(weight, value, total) if weight != ZERO else total
