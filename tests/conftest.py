"""What the tests share: caches filled with a sentinel, compared whole and byte by byte."""

import numpy as np
import pytest

import kvcache_dpex  # noqa: F401  (first, so that it finds the libraries of dpctl and dpnp)
from kvcache_dpex.runtime import arrays, devices

SENTINEL = 0xA5


@pytest.fixture(scope="session")
def queue():
    """The queue of the best device."""
    return devices.queue_for()


def sentinel(shape, dtype):
    """An array whose every byte is the sentinel."""
    array = np.empty(shape, dtype)
    array.view(np.uint8).reshape(-1)[:] = SENTINEL
    return array


def random_bits(rng, shape, dtype):
    """Every bit pattern, NaN payloads included."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)


def to_device(array, queue, usm_type="device"):
    """A usm_ndarray with the values of a NumPy array, strides and all kept where they matter."""
    tensor = arrays.tensor_module()
    return tensor.asarray(array, sycl_queue=queue, usm_type=usm_type)


def to_bytes(array):
    """The bytes of a device or host array, element by element."""
    host = array if isinstance(array, np.ndarray) else arrays.to_numpy(array)
    return np.ascontiguousarray(host).view(np.uint8)
