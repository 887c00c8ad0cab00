"""to_torch and from_torch: one memory, and no torch that reads before SYCL has written."""

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import kvcache_dpex  # noqa: E402
from helpers import output_of, to_device  # noqa: E402
from kvcache_dpex import torch as kv  # noqa: E402
from kvcache_dpex.runtime.environment import devices  # noqa: E402
from kvcache_dpex.runtime.launch import arrays  # noqa: E402

USM_TYPES = ["device", "shared", "host"]
DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64"]

LAYOUTS = {
    "C order": lambda a: a,
    "transposed": lambda a: a.T,
    "offset": lambda a: a[2:, 1:],
    "steps": lambda a: a[::2, 1::2],
    "axes swapped": lambda a: a[:, ::3].T,
    "one row": lambda a: a[3],
    "one element": lambda a: a[1:2, 1],
    "scalar": lambda a: a[1, 1],
    "no element": lambda a: a[:0],
}


@pytest.fixture(scope="module")
def cpu():
    return devices.queue_for("cpu")


@pytest.fixture(scope="module")
def host():
    return np.arange(42, dtype="f4").reshape(6, 7)


@pytest.mark.parametrize("usm_type", USM_TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_ways_share_memory(layout, usm_type, cpu, host):
    usm = LAYOUTS[layout](to_device(host, cpu, usm_type))
    tensor = kv.to_torch(usm)
    assert tensor.shape == usm.shape
    np.testing.assert_array_equal(tensor.numpy(), LAYOUTS[layout](host))
    back = kv.from_torch(tensor)
    np.testing.assert_array_equal(arrays.to_numpy(back), LAYOUTS[layout](host))
    if tensor.numel():
        assert back.get_array()._pointer == tensor.data_ptr() == usm._pointer
        assert back.usm_type == usm_type
        tensor += 100
        np.testing.assert_array_equal(arrays.to_numpy(back), LAYOUTS[layout](host) + 100)
        back[...] = 7
        back.sycl_queue.wait()
        assert (tensor == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, cpu):
    bits = np.arange(64, dtype="u1") % 2 if dtype == "bool" else np.arange(64, dtype="u1")
    usm = to_device(bits.view(dtype), cpu)
    tensor = kv.to_torch(arrays.as_dpnp(usm))
    assert str(tensor.dtype) == f"torch.{dtype}"
    np.testing.assert_array_equal(tensor.view(torch.uint8).numpy(), bits)
    assert kv.from_torch(tensor).dtype == np.dtype(dtype)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_travel_as_bits(name, cpu):
    key_cache, _ = kvcache_dpex.empty_cache(4, 2, 2, 8, dtype=name, device="cpu")
    tensor = kv.to_torch(key_cache, getattr(torch, name))
    tensor[1, 1] = 1.5
    assert tensor.dtype == getattr(torch, name)
    back = kv.from_torch(tensor[1])
    assert back.dtype == key_cache.dtype
    assert back.get_array()._pointer == tensor[1].data_ptr()
    bits = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.uint16)
    np.testing.assert_array_equal(arrays.to_numpy(key_cache), bits.numpy())


def test_memory_lives_as_long_as_a_tensor(cpu, host):
    tensor = kv.to_torch(to_device(host, cpu))
    gc.collect()
    for _ in range(20):
        to_device(np.full_like(host, -1), cpu)
    np.testing.assert_array_equal(tensor.numpy(), host)


def test_memory_lives_as_long_as_an_array(cpu, host):
    array = kv.from_torch(kv.to_torch(to_device(host, cpu))[1:])
    gc.collect()
    for _ in range(20):
        to_device(np.full_like(host, -1), cpu)
    np.testing.assert_array_equal(arrays.to_numpy(array), host[1:])


def test_work_that_runs_is_waited_for(cpu):
    """A copy, since operations of older dpctl and dpnp return when they are done."""
    size = 1 << 24
    source, target = (arrays.tensor_module().zeros(size, dtype="f4", sycl_queue=cpu) for _ in range(2))
    for turn in range(1, 4):
        source[...] = turn
        cpu.wait()
        copied = cpu.memcpy_async(target.usm_data, source.usm_data, target.nbytes)
        tensor = kv.to_torch(target)
        assert tensor[:: 1 << 22].tolist() == [turn] * 4
        assert tensor[-1] == turn
        copied.wait()


def test_a_kernel_and_torch_work_on_one_cache(cpu):
    key_cache, value_cache = kvcache_dpex.empty_cache(4, 2, 2, 8, device="cpu")
    tensors = kv.to_torch(key_cache), kv.to_torch(value_cache)
    key, value = torch.randn(2, 3, 2, 8)
    kv.reshape_and_cache(key, value, *tensors, torch.tensor([5, -1, 0]))
    np.testing.assert_array_equal(arrays.to_numpy(key_cache)[2, 1], key[0].numpy())
    np.testing.assert_array_equal(arrays.to_numpy(value_cache)[0, 0], value[2].numpy())


def test_reversed_arrays_are_refused_and_end_nothing():
    code = """
import numpy as np
import kvcache_dpex, dpnp
from kvcache_dpex import torch as kv
for count, step in ((6, -1), (6, -2), (7, -2)):
    array = dpnp.asarray(np.arange(count, dtype="i4"), device="cpu")[::step]
    try:
        kv.to_torch(array)
    except ValueError as error:
        print(error)
"""
    lines = output_of(code).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("`array` must have strides >= 0, got [-2]")


def test_arrays_that_are_refused(cpu, host):
    read_only = to_device(host, cpu)
    read_only.flags["W"] = False
    with pytest.raises(ValueError, match="`array` must be writable, for a tensor always is"):
        kv.to_torch(read_only)
    for thing in (host, torch.zeros(2), None):
        with pytest.raises(TypeError, match="`array` must be a dpnp array or a usm_ndarray, got"):
            kv.to_torch(thing)
    with pytest.raises(
        TypeError, match=r"`dtype` must be as wide as float32, the dtype of `array`, got torch.b"
    ):
        kv.to_torch(to_device(host, cpu), torch.bfloat16)


REFUSED = {
    "ordinary memory": (lambda: torch.zeros(3), ValueError, "`tensor` must be in memory that SYCL allocated"),
    "gradient": (lambda: torch.zeros(3, requires_grad=True), ValueError, r"gradient.*tensor.detach\(\)"),
    "conjugated": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), ValueError, "conjugated or negated"),
    "negated": (
        lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
        ValueError,
        "conjugated or negated",
    ),
    "meta": (lambda: torch.zeros(3, device="meta"), TypeError, "`tensor` must be on the CPU or an XPU"),
    "sparse": (lambda: torch.eye(3).to_sparse(), TypeError, "`tensor` must be dense"),
    "NumPy": (lambda: np.zeros(3), TypeError, "`tensor` must be a torch.Tensor, got numpy.ndarray"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_are_refused(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        kv.from_torch(make())


def test_no_element_needs_no_memory():
    array = kv.from_torch(torch.zeros(0, 3, dtype=torch.bfloat16))
    assert array.shape == (0, 3)
    assert array.dtype == np.uint16
