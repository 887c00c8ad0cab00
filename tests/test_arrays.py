"""What a launch learns of an array, the same from dpnp's arrays and usm_ndarrays of every release."""

from types import SimpleNamespace

import numpy as np
import pytest

from helpers import Twins, to_device
from kvcache_dpex.runtime.launch import arrays

VIEWS = {
    "whole": np.s_[:],
    "steps": np.s_[::2, 1:, ::3],
    "reversed": np.s_[::-1, :, ::-1],
    "one element": np.s_[2:3, 1:2, 4:5],
    "empty": np.s_[:0],
}


@pytest.fixture(params=["usm_ndarray", "dpnp"])
def wrap(request):
    return arrays.as_dpnp if request.param == "dpnp" else lambda usm: usm


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "complex64"])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_pointer_shape_strides_dtype_queue(queue, wrap, view, dtype):
    """A8: strides are in elements, whatever the unit of `strides`; a pointer is the first element's."""
    base = np.zeros((4, 5, 6), dtype)
    host = base[VIEWS[view]]
    twins = Twins(queue)
    whole, _ = arrays.read(wrap(twins.view(base)), "whole")
    pointer, fields = arrays.read(wrap(twins.view(host)), "view")
    operand = arrays.Operand(*fields)
    assert (operand.shape, operand.dtype_name, operand.itemsize) == (host.shape, dtype, host.itemsize)
    assert operand.queue == queue
    if host.size:
        assert operand.strides == tuple(stride // host.itemsize for stride in host.strides)
        assert pointer - whole == host.__array_interface__["data"][0] - base.__array_interface__["data"][0]


@pytest.mark.parametrize("character", "?bBhHiIlLqQef")
def test_a_dtype_is_what_the_array_says(queue, wrap, character):
    array = wrap(to_device(np.zeros((2, 3), character), queue))
    assert arrays.read(array, "array")[1][2] == array.dtype == np.dtype(character)


def test_where_its_state_lies_is_found_or_the_array_is_asked(queue, wrap, monkeypatch):
    """A release whose objects show no such state is only slower."""
    usm = to_device(np.zeros((2, 3), "int16"), queue)
    assert arrays._state_place(usm) is not None
    only = to_device(np.zeros(1, "float32"), queue)
    tensor = SimpleNamespace(empty=lambda size, dtype, sycl_queue: only)
    monkeypatch.setattr(arrays, "tensor_module", lambda: tensor)
    assert arrays._state_place(usm) is None
    monkeypatch.setattr(arrays, "_readers", {})
    monkeypatch.setattr(arrays, "_output_readers", {})
    array = wrap(usm)
    assert arrays.read(array, "array") == arrays.read_output(array, "array")
    assert arrays.read(array, "array")[1][2] == np.dtype("int16")
    usm.flags.writable = False
    with pytest.raises(ValueError, match=r"^`array` must be writable, got a read-only array$"):
        arrays.read_output(array, "array")


def test_an_array_that_becomes_read_only_is_refused(queue, wrap):
    usm = to_device(np.zeros((2, 3), "float32"), queue)
    array = wrap(usm)
    for _ in range(2):
        assert arrays.read_output(array, "array") == arrays.read(array, "array")
    usm.flags.writable = False
    with pytest.raises(ValueError, match=r"^`array` must be writable, got a read-only array$"):
        arrays.read_output(array, "array")
    assert arrays.read(array, "array")[1][2] == np.dtype("float32")


def test_nothing_is_looked_for_in_an_array_of_another_package(queue):
    class Other:
        def __init__(self, usm):
            self.usm = usm

        def __getattr__(self, name):
            return getattr(self.usm, name)

    usm = to_device(np.zeros((2, 3), "int16"), queue)
    assert arrays.read(Other(usm), "array") == arrays.read(usm, "array")
    Other.__name__ = "usm_ndarray"
    assert arrays._state_place(Other(usm)) is None


def test_slices_that_dpnp_makes_itself(queue):
    """A8: the same for views that are sliced on the device, where no test chose the strides."""
    import dpnp

    base = dpnp.zeros((4, 5, 6), dtype="float32", sycl_queue=queue)
    start, _ = arrays.read(base, "base")
    pointer, fields = arrays.read(base[1:, ::2, ::-1], "view")
    assert fields[:2] == ((3, 3, 6), (30, 12, -1))
    assert pointer - start == 4 * (30 + 5)
    assert arrays.read(base.transpose(), "view")[1][:2] == ((6, 5, 4), (1, 6, 30))


def test_equal_arrays_share_a_geometry(queue, wrap):
    """Fields are hashable and equal for arrays of one kind: a launch is found by them."""
    import dpctl

    one, two = (wrap(to_device(np.zeros((2, 3), "float32"), queue)) for _ in range(2))
    other_dtype = wrap(to_device(np.zeros((2, 3), "int32"), queue))
    other_queue = wrap(to_device(np.zeros((2, 3), "float32"), dpctl.SyclQueue(queue.sycl_device)))
    fields = [arrays.read(array, "array")[1] for array in (one, two, other_dtype, other_queue)]
    assert fields[0] == fields[1]
    assert len(set(fields)) == 3


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_to_numpy(queue, wrap, view):
    host = np.arange(120, dtype="float32").reshape(4, 5, 6)[VIEWS[view]]
    found = arrays.to_numpy(wrap(Twins(queue).view(host)))
    np.testing.assert_array_equal(found, host)
    assert found.dtype == host.dtype
