"""Rows as codes with a scale, and what codes mean."""

from __future__ import annotations

import numpy as np


def quantize_row(row):
    """Codes and scale of one float32 row: ``scale = absmax / 127``, ``code = clamp(rint(x / scale))``."""
    zeros = np.zeros(row.shape, "int8")
    absmax = np.max(np.abs(row), initial=np.float32(0))
    if np.isnan(absmax):
        return zeros, np.float32(np.nan)
    scale = absmax / np.float32(127)
    if scale == 0 or np.isinf(scale):
        return zeros, scale
    return np.clip(np.rint(row / scale), -127, 127).astype("int8"), scale


def quantize_row_fp8(row):
    """Codes and scale of one float32 row: ``scale = absmax / 448``, ``code = e4m3(x / scale)``."""
    zeros = np.zeros(row.shape, "uint8")
    absmax = np.max(np.abs(row), initial=np.float32(0))
    if np.isnan(absmax):
        return zeros, np.float32(np.nan)
    scale = absmax / np.float32(448)
    if scale == 0 or np.isinf(scale):
        return zeros, scale
    # The code of -0 is that of 0.
    return to_e4m3(np.where(row == 0, 0, row / scale)), scale


def e4m3_values():
    """What the 128 codes without a sign mean: 4 bits of exponent, 3 of mantissa, and NaN as the last."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    small, large = mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10)
    values = np.where(exponent == 0, small, large).astype("f4")
    values[127] = np.nan
    return values


def e5m2_values():
    """What the 128 codes without a sign mean: the upper bytes of float16, with infinity and three NaN."""
    values = (np.arange(128, dtype="u2") << 8).view("f2").astype("f4")
    values[125:] = np.nan
    return values


def to_e4m3(x):
    """The nearest float8_e4m3fn of float32 values, ties to even, at most 448 in magnitude, as its bits."""
    return nearest_code(x, e4m3_values()[:127])


def to_e5m2(x):
    """The nearest float8_e5m2 of float32 values, ties to even, at most 57344 in magnitude, as its bits."""
    return nearest_code(x, e5m2_values()[:124])


def nearest_code(x, values):
    """Where in `values` the number nearest to ``|x|`` is, or the even one of two, and the sign of x."""
    between = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x)
    code = np.searchsorted(between, magnitude)  # a value that lies between two codes gives the lower
    tie = magnitude == between[np.minimum(code, len(between) - 1)]
    code = np.where(np.isnan(x), 127, code + (tie & (code % 2 == 1)))
    return (code | np.signbit(x) * 0x80).astype("uint8")


def from_e4m3(codes):
    """The float32 values of float8_e4m3fn bits."""
    return signed_values(codes, e4m3_values())


def from_e5m2(codes):
    """The float32 values of float8_e5m2 bits."""
    return signed_values(codes, e5m2_values())


def signed_values(codes, values):
    """What codes mean, of which `values` are those without a sign."""
    found = values[codes & 0x7F]
    return np.where((codes >= 0x80) & ~np.isnan(found), -found, found)


def values_of(codes, format=None):
    """The float32 values of codes, without their scales."""
    readers = {"fp8_per_token_head": from_e4m3, "fp8_e4m3": from_e4m3, "fp8_e5m2": from_e5m2}
    return readers[format](codes) if format in readers else codes.astype("f4")


def scales_of_rows(scales, rows):
    """Scales for the first three axes of a cache, whether there is one in all, a head, or a row."""
    return np.broadcast_to(scales, rows) if scales.ndim < 2 else scales.reshape(rows)
