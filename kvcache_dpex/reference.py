"""The oracle: every public operation again, on NumPy arrays, in loops that a reader believes at once.

Same names, same argument order, same in-place semantics as the package's operations. Where slots
repeat, the last row wins here; the device leaves the winner open.
"""

from __future__ import annotations

import numpy as np


def empty_cache(num_blocks, block_size, num_kv_heads, head_size, *, dtype="float32"):
    """Two caches of zeros, ``[num_blocks, block_size, num_kv_heads, head_size]``."""
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return np.zeros(shape, dtype), np.zeros(shape, dtype)


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping):
    """Copy row ``token`` of key and value to slot ``slot_mapping[token]``; other slots stay as they are."""
    num_blocks, block_size = key_cache.shape[:2]
    for token, slot in enumerate(slot_mapping):
        if 0 <= slot < num_blocks * block_size:
            block, offset = divmod(int(slot), block_size)
            key_cache[block, offset] = key[token]
            value_cache[block, offset] = value[token]


def empty_quant_cache(num_blocks, block_size, num_kv_heads, head_size, *, format="int8_per_token_head"):
    """Two caches of codes and their scales ``[num_blocks * block_size, num_kv_heads]``, all zero."""
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    scales = (num_blocks * block_size, num_kv_heads)
    codes = "uint8" if format == "fp8_per_token_head" else "int8"
    return np.zeros(shape, codes), np.zeros(shape, codes), np.zeros(scales, "f4"), np.zeros(scales, "f4")


def reshape_and_cache_quant(key, value, kq, vq, ks, vs, slot_mapping, *, dtype=None, format=None):
    """Quantize row ``token``, head by head, into slot ``slot_mapping[token]``; other slots stay."""
    num_blocks, block_size = kq.shape[:2]
    quantize = quantize_row_fp8 if format == "fp8_per_token_head" else quantize_row
    for rows, codes, scales in ((key, kq, ks), (value, vq, vs)):
        scales = scales.reshape(codes.shape[:3]) if scales.ndim == 2 else scales
        for token, slot in enumerate(slot_mapping):
            if 0 <= slot < num_blocks * block_size:
                block, offset = divmod(int(slot), block_size)
                for head, row in enumerate(as_float32(rows[token], dtype)):
                    codes[block, offset, head], scales[block, offset, head] = quantize(row)


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


def to_e4m3(x):
    """The nearest float8_e4m3fn of float32 values, ties to even, at most 448 in magnitude, as its bits."""
    values = e4m3_values()[:127]
    between = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x)
    code = np.searchsorted(between, magnitude)  # a value that lies between two codes gives the lower
    tie = magnitude == between[np.minimum(code, 125)]
    code = np.where(np.isnan(x), 127, code + (tie & (code % 2 == 1)))
    return (code | np.signbit(x) * 0x80).astype("uint8")


def from_e4m3(codes):
    """The float32 values of float8_e4m3fn bits."""
    values = e4m3_values()[codes & 0x7F]
    return np.where((codes >= 0x80) & ~np.isnan(values), -values, values)


def dequant_cache(q, scales, *, dtype="float32", blocks=None, format=None):
    """``float32(code) * scale``, rounded once to `dtype`; NaN where the scale is not finite.

    With `blocks`, result block ``n`` shows block ``blocks[n]``, or zeros where there is no such block.
    """
    scales = scales.reshape(q.shape[:3])
    chosen = np.arange(q.shape[0]) if blocks is None else np.asarray(blocks)
    out = np.zeros((*chosen.shape, *q.shape[1:]), "f4")
    for n, block in np.ndenumerate(chosen):
        if 0 <= block < q.shape[0]:
            scale = np.where(np.isfinite(scales[block]), scales[block], np.float32(np.nan))
            values = from_e4m3(q[block]) if format == "fp8_per_token_head" else q[block].astype("f4")
            out[n] = values * scale[:, :, None]
    return from_float32(out, dtype)


def as_float32(array, dtype=None):
    """Values as float32; of uint16 arrays, which hold bits, `dtype` says "bfloat16"."""
    if str(dtype) == "bfloat16":
        return (array.astype("u4") << 16).view("f4")
    return array.astype("f4")


def from_float32(array, dtype):
    """Values rounded to `dtype`, to nearest even; "bfloat16" gives the bits as uint16."""
    if str(dtype) != "bfloat16":
        with np.errstate(over="ignore"):
            return array.astype(dtype)
    bits = np.ascontiguousarray(array).view("u4")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(array), bits >> 16, rounded).astype("u2")
