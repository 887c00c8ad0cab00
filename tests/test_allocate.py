"""empty_cache: shapes, dtypes, devices, and the device's limits before any memory is asked for."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import to_bytes, to_device
from kvcache_dpex import dequant_cache, empty_cache, empty_quant_cache, reference, reshape_and_cache_quant
from kvcache_dpex.runtime.environment import devices
from kvcache_dpex.runtime.launch import arrays


@pytest.mark.parametrize("value_head_size", [None, 3])
@pytest.mark.parametrize("usm_type", ["device", "shared", "host"])
def test_zeros(queue, usm_type, value_head_size):
    key_cache, value_cache = empty_cache(
        3, 4, 2, 8, value_head_size=value_head_size, usm_type=usm_type, device=queue
    )
    assert key_cache.shape == (3, 4, 2, 8)
    assert value_cache.shape == (3, 4, 2, value_head_size or 8)
    for cache in (key_cache, value_cache):
        assert type(cache).__module__.startswith("dpnp")
        assert (cache.dtype, cache.usm_type, cache.sycl_queue) == (np.float32, usm_type, queue)
        assert not to_bytes(cache).any()
    assert arrays.read(key_cache, "key_cache")[0] != arrays.read(value_cache, "value_cache")[0]


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        ("bfloat16", "uint16"),
        ("float8_e4m3fn", "uint8"),
        ("float8_e5m2", "uint8"),
        ("float16", "float16"),
        (np.float16, "float16"),
        (np.dtype("int8"), "int8"),
        ("int64", "int64"),
        ("complex64", "complex64"),
        ("bool", "bool"),
        (float, "float64"),
        (np.dtype("q"), "int64"),
        (np.dtype("Q"), "uint64"),
    ],
    ids=str,
)
def test_dtypes(queue, dtype, storage):
    if storage == "float64" and not queue.sycl_device.has_aspect_fp64:
        pytest.skip(f"{queue.sycl_device.name} has no float64 arrays")
    for cache in empty_cache(2, 4, 1, 8, dtype=dtype):
        assert cache.dtype == storage


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float31", "`dtype` must be a dtype or its name, got 'float31'"),
        (7, "`dtype` must be a dtype or its name, got 7"),
        ("complex128", "`dtype` must be numeric, of 1, 2, 4 or 8 bytes, got 'complex128'"),
        ("datetime64[s]", "`dtype` must be numeric, of 1, 2, 4 or 8 bytes, got 'datetime64[s]'"),
        ("U1", "`dtype` must be numeric, of 1, 2, 4 or 8 bytes, got 'U1'"),
        (object, "`dtype` must be numeric, of 1, 2, 4 or 8 bytes, got <class 'object'>"),
    ],
    ids=str,
)
def test_dtypes_that_no_cache_holds(dtype, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        empty_cache(2, 4, 1, 8, dtype=dtype)


@pytest.mark.parametrize("shape", [(0, 16, 2, 8), (1, 1, 1, 1)])
def test_smallest_caches(shape):
    for cache in empty_cache(*shape):
        assert cache.shape == shape


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match=r"^`block_size` must be >= 1, got 0$"):
        empty_cache(2, 0, 1, 8)
    with pytest.raises(TypeError, match=r"^`head_size` must be an int, got float$"):
        empty_cache(2, 4, 1, 8.0)


@pytest.fixture
def small_device(monkeypatch):
    """A device of 3 GiB that allocates at most 1 GiB at once; allocating anything on it fails the test."""
    device = SimpleNamespace(name="Small GPU", max_mem_alloc_size=2**30, global_mem_size=3 * 2**30)
    queue = SimpleNamespace(sycl_device=device)
    monkeypatch.setattr(devices, "queue_for", lambda chosen: queue)

    def zeros(shape, dtype, queue, usm_type):
        assert np.prod(shape) * dtype.itemsize <= device.max_mem_alloc_size
        return shape

    monkeypatch.setattr(arrays, "zeros", zeros)
    return device


def test_largest_allocation(small_device):
    """One block more than the limit is refused before anything is allocated; the limit itself is not.

    compute-runtime #627.
    """
    block = 16 * 8 * 128 * 4
    limit = 2**30 // block
    assert empty_cache(limit, 16, 8, 128) == ((limit, 16, 8, 128), (limit, 16, 8, 128))
    message = (
        f"`num_blocks` = {limit + 1} needs 1.00 GiB for key_cache, but Small GPU allocates at most "
        f"1.00 GiB at once; use at most {limit} blocks, or one cache for each layer"
    )
    with pytest.raises(MemoryError, match=f"^{re.escape(message)}$"):
        empty_cache(limit + 1, 16, 8, 128)
    with pytest.raises(MemoryError, match="for value_cache, but Small GPU"):
        empty_cache(limit, 16, 8, 64, value_head_size=129)


def test_whole_memory(small_device):
    """compute-runtime #627: two caches that each fit but do not fit together."""
    small_device.global_mem_size = 2 * 2**30 - 1
    message = "the caches need 2.00 GiB, but Small GPU has 2.00 GiB; use fewer blocks or a smaller dtype"
    with pytest.raises(MemoryError, match=f"^{re.escape(message)}$"):
        empty_cache(2**30 // (16 * 8 * 128 * 4), 16, 8, 128)


def test_sizes_are_counted_in_whole_numbers(small_device):
    """No float and no 32-bit product on the way: a cache of 2**62 bytes is refused like any other."""
    with pytest.raises(MemoryError, match=r"needs 4294967296\.00 GiB for key_cache"):
        empty_cache(2**55, 16, 8, 1, dtype="int8")


def test_devices_own_limits(queue):
    """compute-runtime #627: the limits are the real device's where nothing is faked."""
    device = queue.sycl_device
    blocks = device.max_mem_alloc_size // (16 * 128) + 1
    with pytest.raises(MemoryError, match=re.escape(f"but {device.name} allocates at most")):
        empty_cache(blocks, 16, 1, 128, dtype="int8", device=queue)


@pytest.mark.parametrize("format", ["int8_per_token_head", "fp8_per_token_head"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_scales_inline(queue, order, format):
    """One allocation of rows ``[K codes | float32 | V codes | float32]`` in the order that was asked for."""
    shape = 3, 4, 2, 8
    caches = empty_quant_cache(*shape, value_head_size=12, format=format, inline=order, device=queue)
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((5, 2, 8), "f4"), rng.standard_normal((5, 2, 12), "f4")
    slots = np.array([3, -1, 11, 0, 6])
    expected = reference.empty_quant_cache(*shape, format=format)
    expected = expected[0], np.zeros((3, 4, 2, 12), expected[0].dtype), *expected[2:]
    reference.reshape_and_cache_quant(*rows, *expected, slots, format=format)
    on_device = [to_device(each, queue) for each in (*rows, slots)]
    reshape_and_cache_quant(*on_device[:2], *caches, on_device[2], format=format)
    pieces = [
        to_bytes(each).reshape(3, 4, 2, -1) for each in (expected[0], expected[2], expected[1], expected[3])
    ]
    whole = np.concatenate(pieces, axis=3)
    memory = caches[0].get_array().usm_data.copy_to_host()
    assert memory.tobytes() == (whole if order == "NHD" else whole.swapaxes(1, 2)).tobytes()
    for codes, scales, wanted, wanted_scales in zip(caches[:2], caches[2:], expected, expected[2:]):
        assert scales.shape == shape[:3]
        found = arrays.to_numpy(dequant_cache(codes, scales, format=format))
        np.testing.assert_array_equal(found, reference.dequant_cache(wanted, wanted_scales, format=format))


@pytest.mark.parametrize(
    ("sizes", "inline", "message"),
    [
        ({"head_size": 8}, "NHB", "`inline` must be 'NHD', 'HND' or None, got 'NHB'"),
        ({"head_size": 6}, "NHD", "`head_size` must be a multiple of 4 where scales are inline, got 6"),
        ({"head_size": 8, "value_head_size": 2}, "HND", "`value_head_size` must be a multiple of 4"),
    ],
)
def test_scales_that_cannot_be_inline(sizes, inline, message):
    with pytest.raises(ValueError, match=message):
        empty_quant_cache(3, 4, 2, **sizes, inline=inline)
