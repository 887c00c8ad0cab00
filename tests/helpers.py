"""What the tests share: bytes, the same views on host and device, whole memories compared."""

import ctypes
import functools
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcache_dpex import reference
from kvcache_dpex.ops import write
from kvcache_dpex.runtime.compile import package, simulate, spirv, store
from kvcache_dpex.runtime.compile.memory import Pointer
from kvcache_dpex.runtime.launch import arrays

ROOT = Path(__file__).parent.parent
SENTINEL = 0xA5
# NumPy has no such types: a kernel takes their bits.
STORED = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
KERNELS = {function.__name__: function for function, _ in package.catalogue()}


def sentinel(shape, dtype):
    """An array whose every byte is the sentinel."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = SENTINEL
    return array


def random_bits(rng, shape, dtype):
    """Every bit pattern, NaN payloads included."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)


def to_bytes(array):
    """The bytes of a device or host array, element by element."""
    host = array if isinstance(array, np.ndarray) else arrays.to_numpy(array)
    return np.ascontiguousarray(host).view(np.uint8)


def to_device(array, queue, usm_type="device"):
    """A contiguous usm_ndarray with the values of a NumPy array."""
    return arrays.tensor_module().asarray(array, sycl_queue=queue, usm_type=usm_type)


class Twins:
    """The memories of NumPy arrays again on a device, and the same views of them."""

    def __init__(self, queue):
        self.queue = queue
        self._memories = {}

    def view(self, host):
        """A usm_ndarray with the shape, strides, offset and bytes of a view of a NumPy array."""
        root = _root(host)
        place = {"buffer": self._memory(root)}
        if host.size:
            offset = host.__array_interface__["data"][0] - root.__array_interface__["data"][0]
            place["offset"] = offset // host.itemsize
            place["strides"] = tuple(stride // host.itemsize for stride in host.strides)
        return arrays.tensor_module().usm_ndarray(host.shape, dtype=host.dtype, **place)

    def host(self, array):
        """A view of a NumPy array again, with what its memory holds on the device."""
        self.queue.wait()
        root, memory = self._memories[id(_root(array))]
        copy = np.empty_like(root)
        _flat(copy)[:] = memory.copy_to_host()[: root.nbytes]
        offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return np.ndarray(array.shape, array.dtype, copy, offset, array.strides)

    def assert_equal(self):
        """Every memory of the device, gaps included, holds the bytes of its NumPy array."""
        self.queue.wait()
        for root, memory in self._memories.values():
            if root.nbytes:
                np.testing.assert_array_equal(memory.copy_to_host()[: root.nbytes], _flat(root))

    def _memory(self, root):
        from dpctl.memory import MemoryUSMDevice

        if id(root) not in self._memories:
            memory = MemoryUSMDevice(max(root.nbytes, 8), queue=self.queue)
            if root.nbytes:
                memory.copy_from_host(_flat(root))
            self._memories[id(root)] = root, memory
        return self._memories[id(root)][1]


def _root(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _flat(root):
    """The bytes of an array that has its memory for itself, in the memory's order."""
    return root.ravel(order="K").view(np.uint8)


def check_write(queue, key, value, key_cache, value_cache, slots, *, wrap=None, **options):
    """The package's write and the reference's, from the same bytes, leave the same bytes everywhere."""
    twins = Twins(queue)
    host = key, value, key_cache, value_cache, slots
    device = [twins.view(array) for array in host]
    write.reshape_and_cache(*(wrap(array) for array in device) if wrap else device, **options)
    reference.reshape_and_cache(*host)
    twins.assert_equal()


def contiguous_case(rng, dtype, *, blocks=5, block_size=4, heads=2, size=8, value_size=None, tokens=6):
    """Rows and sentinel-filled caches without gaps."""
    value_size = size if value_size is None else value_size
    return (
        random_bits(rng, (tokens, heads, size), dtype),
        random_bits(rng, (tokens, heads, value_size), dtype),
        sentinel((blocks, block_size, heads, size), dtype),
        sentinel((blocks, block_size, heads, value_size), dtype),
    )


def skip_record_on_gpu(name, queue):
    """A kernel that takes a record of its arguments is for CPU devices."""
    if KERNELS[name].__globals__.get("IN_RECORD") and not queue.sycl_device.is_cpu:
        pytest.skip(f"{name} is for CPU devices")


@functools.cache
def compiled(function, **types):
    """A kernel's module, compiled now whatever is packaged or cached."""
    wanted = store.signature(function, **types)
    return store.Module(*wanted, store.compile_signature(function, wanted), "compiled")


def tiny_module(entry):
    """The shortest bytes that count as SPIR-V with this entry point."""
    text = entry.encode() + b"\0" * (4 - len(entry) % 4)
    words = [spirv.MAGIC, 0x10000, 0, 2, 0, spirv.OP_ENTRY_POINT | (3 + len(text) // 4) << 16, 6, 1]
    return struct.pack("<8I", *words) + text


class PlainLaunch:
    """In the place of `launch.Launch`: the kernel as plain Python over the memory of the CPU device."""

    def __init__(self, module, queue, scalars, global_size, local_size):
        name, *values = module.name.split("-")
        self.kernel = KERNELS[name]
        self.types = dict(zip(self.kernel.__globals__["TYPES"], values))
        elements = [text[:-1] for text in module.arguments if text.endswith("*")]
        self.elements = [np.dtype(STORED.get(element, element)) for element in elements]
        self.queue, self.scalars = queue, scalars
        self.global_size, self.local_size = global_size, local_size

    def __call__(self, pointers, owners=None):
        self.queue.wait()
        memories = [_checked(*each) for each in zip(pointers, owners, self.elements)]
        sizes = self.global_size, memories, self.scalars, self.local_size
        simulate.simulate(self.kernel, *sizes, types=self.types)


def _checked(address, owner, dtype):
    """The whole allocation behind a pointer, so that a step outside raises; nothing without an owner."""
    if owner is None:
        return Pointer(np.empty(0, dtype))
    usm = owner.get_array() if hasattr(owner, "get_array") else owner
    memory = usm.usm_data
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory._pointer))
    # A CPU loads a word from anywhere; other devices may not.
    assert address % dtype.itemsize == 0, f"a pointer to {dtype} is off its grid"
    before, skipped = divmod(address - memory._pointer, dtype.itemsize)
    count = (memory.nbytes - skipped) // dtype.itemsize
    return Pointer(whole[skipped : skipped + count * dtype.itemsize].view(dtype), before)


def run_python(code, *, arguments=None, path=ROOT, timeout=120, stderr=subprocess.PIPE, **environment):
    """Run code, or Python with these arguments, in a new process; None in `environment` unsets a variable."""
    variables = {**os.environ, "PYTHONPATH": str(path), **environment}
    return subprocess.run(
        [sys.executable, *(arguments or ["-c", code])],
        env={name: value for name, value in variables.items() if value is not None},
        cwd=path,  # `-c` looks there first
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=timeout,
        check=False,
    )


def output_of(code, **options):
    """What code prints in a fresh interpreter, which must end well."""
    done = run_python(code, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
