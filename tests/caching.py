"""PagedCaches of dpnp arrays and of tensors, and rows that every format keeps exactly."""

import importlib.util
import zlib

import numpy as np
import pytest

import kvcache_dpex as kv
from helpers import to_device
from kvcache_dpex.runtime.launch import arrays

FORMATS = ["float32", "float16", "bfloat16", "int8_per_token_head", "fp8_per_token_head"]
FORMATS += ["int8_per_token_head HND", "fp8_per_token_head NHD"]  # scales inline, in this order
HEADS, SIZES = 2, (16, 8)
KINDS = ["arrays", "tensors"] if importlib.util.find_spec("torch") else ["arrays"]


def new_cache(kind, format, queue, num_blocks=6, block_size=3, num_layers=2, **options):
    """A small cache, whose values have a head size of their own."""
    if kind == "arrays" and format == "float16" and not queue.sycl_device.has_aspect_fp16:
        pytest.skip(f"{queue.sycl_device.name} has no float16")
    kinds = kv if kind == "arrays" else kv.torch
    device = queue if kind == "arrays" else "cpu"
    shape = num_layers, num_blocks, block_size, HEADS, SIZES[0]
    format, *inline = format.split()
    options.update(format=format, inline=inline[0] if inline else None, value_head_size=SIZES[1])
    return kinds.PagedCache(*shape, device=device, **options)


def exact_rows(prefixes, layer, size, format):
    """A row for each prefix of tokens, float32: integers times a power of two, so that codes are exact."""
    rows = np.empty((len(prefixes), HEADS, size), np.float32)
    for row, prefix in zip(rows, prefixes):
        rng = np.random.default_rng(zlib.crc32(repr((prefix, layer, size)).encode()))
        row[:] = rng.integers(-16, 17, row.shape)
        row[:, rng.integers(size)] = 448 if format.startswith("fp8") else 127
        row *= 2.0 ** rng.integers(-3, 4, (HEADS, 1))
    return rows


def on_device(cache, rows):
    """Rows in the dtype of a cache's values, beside its arrays."""
    like = cache.layers[0][0]
    dtype = cache.format if cache.format in FORMATS[:3] else "float32"
    if arrays.is_tensor(like):
        import torch

        return torch.from_numpy(rows).to(getattr(torch, dtype))
    if dtype == "bfloat16":
        return to_device((rows.view(np.uint32) >> 16).astype(np.uint16), like.sycl_queue)
    return to_device(rows.astype(dtype), like.sycl_queue)


def to_float32(array):
    """Values on the host; uint16 holds the bits of bfloat16."""
    host = arrays.to_numpy(array)
    if host.dtype == np.uint16:
        return (host.astype(np.uint32) << 16).view(np.float32)
    return host.astype(np.float32)


def prefixes_of(tokens, start=0):
    """What the row of each token depends on."""
    return [tuple(tokens[: at + 1]) for at in range(start, len(tokens))]


def advance(cache, tokens, histories):
    """Append tokens with the rows that belong to them, in all layers; histories are those before."""
    with cache.step(tokens) as step:
        prefixes = [
            prefix
            for name in tokens
            for prefix in prefixes_of([*histories.get(name, []), *tokens[name]], step.start[name])
        ]
        for layer in range(cache.num_layers):
            rows = [on_device(cache, exact_rows(prefixes, layer, size, cache.format)) for size in SIZES]
            step.append(layer, *rows)
    return step


def assert_holds(cache, histories, start=0):
    """Every sequence reads back what was appended from position `start` on, but what its window released."""
    assert set(cache.sequences) == set(histories)
    for name, tokens in histories.items():
        assert cache.length(name) == len(tokens)
        first = cache.pool.block_table(name).count(-1) * cache.block_size
        for layer in range(cache.num_layers):
            for found, size in zip(cache.rows(layer, name), SIZES):
                expected = exact_rows(prefixes_of(tokens), layer, size, cache.format)
                expected[:first] = 0
                np.testing.assert_array_equal(to_float32(found)[start:], expected[start:])
