"""What the tests of the torch module share: tensors as bits, their whole memories, twins for the oracle."""

import copy

import numpy as np
import torch

from helpers import SENTINEL
from kvcache_dpex import reference
from kvcache_dpex import torch as kv

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(shape, dtype, seed=0):
    """A tensor of every bit pattern, NaN payloads included."""
    count = int(np.prod(shape)) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def sentinel(shape, dtype):
    """A tensor whose every byte is the sentinel."""
    return (
        torch.full((int(np.prod(shape)) * dtype.itemsize,), SENTINEL, dtype=torch.uint8)
        .view(dtype)
        .view(shape)
    )


def as_bits(tensor):
    """A NumPy array of the tensor's bits, in its memory."""
    return tensor.detach().view(BITS[tensor.itemsize]).numpy()


def memory(tensor):
    """Every byte of the storage behind a tensor, whatever the tensor shows of it."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def twins(tensors):
    """The same views again, on copies of the same storages."""
    return copy.deepcopy(list(tensors))


def assert_same_memory(tensors, others):
    for index, (tensor, other) in enumerate(zip(tensors, others)):
        assert torch.equal(memory(tensor), memory(other)), f"memory of argument {index} differs"


def check_write(key, value, key_cache, value_cache, slots, run=kv.reshape_and_cache):
    """The write and the reference's, from the same bytes, leave the same bytes everywhere."""
    mine = [key, value, key_cache, value_cache, slots]
    expected = twins(mine)
    run(*mine)
    *arrays, slot_values = expected
    reference.reshape_and_cache(*(as_bits(tensor) for tensor in arrays), slot_values.numpy())
    assert_same_memory(mine, expected)


def contiguous_case(dtype=torch.float32, *, blocks=5, block_size=4, heads=2, size=16, tokens=6):
    """Rows, and sentinel-filled caches without gaps."""
    shape = (blocks, block_size, heads, size)
    return (
        random_bits((tokens, heads, size), dtype, 1),
        random_bits((tokens, heads, size), dtype, 2),
        sentinel(shape, dtype),
        sentinel(shape, dtype),
    )


SLOTS = [7, -1, 19, 0, 20, 3]
