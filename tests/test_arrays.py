"""What a launch learns of an array, the same from dpnp's arrays and usm_ndarrays of every release."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from helpers import Twins, to_device
from kvcache_dpex.runtime.launch import arrays, readers, usm_state

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
    """Strides are in elements, whatever the unit of `strides`; a pointer is the first element's.

    dpnp #1649.
    """
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
    _, fields = arrays.read(array, "array")
    assert fields[2] == array.dtype == np.dtype(character)
    assert arrays.Operand(*fields).dtype_name == np.dtype(character).name


@pytest.fixture
def forgotten(monkeypatch):
    """No type has been read before."""
    monkeypatch.setattr(readers, "_readers", {})
    monkeypatch.setattr(readers, "_output_readers", {})


def is_read_from_the_struct(usm):
    found = usm_state.reader(usm, lambda usm: usm, lambda usm: None, arrays.tensor_module().empty)
    return found is not None


@pytest.mark.parametrize("way", ["switched off", "not found"])
def test_an_array_whose_struct_is_not_read_is_asked(queue, wrap, monkeypatch, forgotten, way):
    """With the switch, and in a release whose objects show no such state, a call is only slower."""
    usm = to_device(np.zeros((2, 3), "int16"), queue)
    assert is_read_from_the_struct(usm)
    if way == "switched off":
        monkeypatch.setenv("KVCACHE_DPEX_USM_STATE", "0")
    else:
        only = to_device(np.zeros(1, "float32"), queue)
        tensor = SimpleNamespace(empty=lambda size, dtype, sycl_queue: only)
        monkeypatch.setattr(arrays, "tensor_module", lambda: tensor)
    assert not is_read_from_the_struct(usm)
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
    assert not is_read_from_the_struct(Other(usm))


def test_slices_that_dpnp_makes_itself(queue):
    """dpnp #1649: the same for views that are sliced on the device, where no test chose the strides."""
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


class OnlyInterface:
    """Memory as dpctl's interface describes it, and nothing else of an array."""

    def __init__(self, usm):
        self.__sycl_usm_array_interface__ = usm.__sycl_usm_array_interface__


FOREIGN = {
    "memory": (lambda usm: usm.usm_data, r"dpctl\.memory\._memory\.MemoryUSMDevice"),
    "interface": (OnlyInterface, r"test_arrays\.OnlyInterface"),
    "class": (lambda usm: type(arrays.as_dpnp(usm)), r"the class dpnp\.dpnp_array\.dpnp_array"),
    "class of usm_ndarray": (type, r"the class .*\.usm_ndarray"),
    "numpy": (lambda usm: np.zeros(3), r"numpy\.ndarray"),
    "list": (lambda usm: [1, 2], r"builtins\.list"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_no_array(queue, case):
    """dpctl #640, dpnp #2554: foreign objects with `__sycl_usm_array_interface__`, and classes."""
    change, name = FOREIGN[case]
    given = change(to_device(np.zeros(3, "float32"), queue))
    wanted = f"^`key` must be a dpnp array, a usm_ndarray or a torch.Tensor, got {name}; dpnp.asarray "
    for read in (arrays.read, arrays.read_output):
        with pytest.raises(TypeError, match=wanted):
            read(given, "key")


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (["f4"], r"a dtype or its name, got \['f4'\]"),
        ([("a", "f4")], "a dtype or its name"),
        ({"a": "f4"}, "a dtype or its name"),
        (None, "a dtype or its name, got None"),
        ("no dtype", "a dtype or its name, got 'no dtype'"),
        (">f4", "in the byte order of the device, got '>f4'; use 'float32'"),
        (np.dtype(">i2"), "in the byte order of the device, got .*; use 'int16'"),
        ("U4", "numeric, of 1, 2, 4 or 8 bytes, got 'U4'"),
        ("complex128", "numeric, of 1, 2, 4 or 8 bytes, got 'complex128'"),
    ],
    ids=str,
)
def test_what_is_no_dtype(dtype, reason):
    with pytest.raises(TypeError, match=f"^`dtype` must be {reason}"):
        arrays.storage_dtype(dtype)


def test_a_torch_that_is_being_imported_is_no_torch(queue, wrap, monkeypatch, forgotten):
    """While a thread imports torch, `sys.modules` has a module without `Tensor` in it."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    usm = to_device(np.arange(3, dtype="float32"), queue)
    array = wrap(usm)
    assert arrays.read(array, "array")[0] == usm._pointer
    assert arrays.to_numpy(array).tolist() == [0, 1, 2]
    assert arrays.empty_like(array, (2,), "float32").shape == (2,)


@pytest.mark.parametrize("usm_type", ["device", "shared", "host"])
def test_a_result_is_of_the_type_of_memory_and_on_the_queue_of_its_source(queue, wrap, usm_type):
    import dpctl

    own_queue = dpctl.SyclQueue(queue.sycl_device)
    source = wrap(to_device(np.zeros(3, "float32"), own_queue, usm_type))
    found = arrays.empty_like(source, (4, 5), "int16")
    assert type(found) is type(source)
    assert (found.shape, found.dtype, found.usm_type) == ((4, 5), np.dtype("int16"), usm_type)
    assert found.sycl_queue == own_queue
