"""The same jobs written in Triton and in plain torch, for comparison in the same run.

The Triton kernels do what ours do on finite rows; they need not care for NaN, infinity or scales that
are denormal, nor for strides, which is to their advantage.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# Rows a program and warps: the best of them is reported.
CHOICES = ((1, 4), (2, 4), (4, 8), (8, 8))


@triton.jit
def _write(key, value, key_cache, value_cache, slots, tokens, ROW: tl.constexpr, ROWS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    word = tl.arange(0, ROW)[None, :]
    source = token[:, None] * ROW + word
    target = slot[:, None] * ROW + word
    written = (slot >= 0)[:, None]
    k = tl.load(key + source, mask=written)
    v = tl.load(value + source, mask=written)
    tl.store(key_cache + target, k, mask=written)
    tl.store(value_cache + target, v, mask=written)


@triton.jit
def _codes(x, scale):
    """``rint(x / scale)`` with the quotient exactly rounded, by one division a row."""
    inverse = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)[:, None]
    quotient = x * inverse
    scales = tl.zeros_like(x) + scale[:, None]
    inverses = tl.zeros_like(x) + inverse
    quotient = tl.fma(tl.fma(-quotient, scales, x), inverses, quotient)
    return libdevice.rint(quotient).to(tl.int8)


@triton.jit
def _quantize(
    key, value, kq, vq, ks, vs, slots, rows, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    slot = tl.load(slots + token, mask=row < rows, other=-1)
    to = slot * HEADS + row % HEADS
    element = tl.arange(0, SIZE)[None, :]
    written = slot >= 0
    source = row[:, None] * SIZE + element
    target = to[:, None] * SIZE + element
    k = tl.load(key + source, mask=written[:, None], other=0.0).to(tl.float32)
    v = tl.load(value + source, mask=written[:, None], other=0.0).to(tl.float32)
    k_scale = tl.div_rn(tl.max(tl.abs(k), 1), 127.0)
    v_scale = tl.div_rn(tl.max(tl.abs(v), 1), 127.0)
    tl.store(kq + target, _codes(k, k_scale), mask=written[:, None])
    tl.store(vq + target, _codes(v, v_scale), mask=written[:, None])
    tl.store(ks + to, k_scale, mask=written)
    tl.store(vs + to, v_scale, mask=written)


@triton.jit
def _dequantize(q, scales, out, rows, SIZE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    at = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    code = tl.load(q + at, mask=inside[:, None], other=0).to(tl.float32)
    scale = tl.load(scales + row, mask=inside, other=0.0)
    tl.store(out + at, code * scale[:, None], mask=inside[:, None])


def triton_write(choice, key, value, key_cache, value_cache, slots):
    tokens, row = key.shape[0], key[0].numel()
    per, warps = choice
    grid = (triton.cdiv(tokens, per),)
    _write[grid](key, value, key_cache, value_cache, slots, tokens, row, per, num_warps=warps)


def triton_quantize(choice, key, value, kq, vq, ks, vs, slots):
    tokens, heads, size = key.shape
    per, warps = choice[0] * 4, choice[1]
    grid = (triton.cdiv(tokens * heads, per),)
    _quantize[grid](key, value, kq, vq, ks, vs, slots, tokens * heads, heads, size, per, num_warps=warps)


def triton_dequantize(choice, q, scales, out):
    rows, size = scales.numel(), q.shape[-1]
    per, warps = choice[0] * 4, choice[1]
    _dequantize[(triton.cdiv(rows, per),)](q, scales, out, rows, size, per, num_warps=warps)


def torch_write(key, value, key_cache, value_cache, slots):
    """As eager code writes: block and offset once, then an indexed store each."""
    block_size = key_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    key_cache[block, offset] = key
    value_cache[block, offset] = value


def torch_quantize(key, value, kq, vq, ks, vs, slots):
    block_size = kq.shape[1]
    block, offset = slots // block_size, slots % block_size
    for rows, codes, scales in ((key, kq, ks), (value, vq, vs)):
        x = rows.float()
        # A tensor, since torch multiplies by the reciprocal of a number.
        scale = x.abs().amax(-1) / torch.full((), 127.0, device=x.device)
        codes[block, offset] = (x / scale[..., None]).round().to(torch.int8)
        scales[slots] = scale


def torch_dequantize(q, scales, out):
    torch.mul(q.float(), scales.view(*q.shape[:3], 1), out=out)
