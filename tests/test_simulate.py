# ruff: noqa: F722, F821  (annotations are the kernel's argument types)
"""The simulator: kernels as plain Python, with every access checked."""

import re

import numpy as np
import pytest

from kvcache_dpex.kernels import device
from kvcache_dpex.kernels.scatter import scatter
from kvcache_dpex.kernels.scatter_strided import scatter_strided
from kvcache_dpex.kernels.scatter_words import scatter_words
from kvcache_dpex.runtime.compile.simulate import Pointer, simulate


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def scalars_of(kernel, **values):
    """A kernel's scalars in its own order, by name."""
    _, *parameters = kernel.__annotations__.items()
    return [values[name] for name, text in parameters if not text.endswith("*")]


@pytest.mark.parametrize(("kernel", "row"), [(scatter, 2), (scatter_words, 4)])
def test_whole_rows(kernel, row):
    """Rows of four 8-byte words, three tokens, a cache of two slots and slots given as 1, -1, 0."""
    key = np.arange(12, dtype="uint64")
    caches = np.zeros((2, 8), "uint64")
    pointers = [key, key + np.uint64(100), caches[0], caches[1], np.array([1, -1, 0], "int32")]
    strides = dict.fromkeys(("key_stride", "value_stride", "key_cache_stride", "value_cache_stride"), row)
    scalars = scalars_of(kernel, num_tokens=3, row=row, num_slots=2, slot_stride=1, **strides)
    simulate(kernel, [row, 4], pointers, scalars, [row, 1])
    assert caches[0].tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    assert caches[1].tolist() == [108, 109, 110, 111, 100, 101, 102, 103]


def strided(slots, *, key_cache=None, key=None, num_slots=4):
    """scatter_strided over two tokens of one head of three bytes; four slots in blocks of two."""
    key = np.arange(6, dtype="uint8") if key is None else key
    caches = [np.full(12, 99, "uint8") if key_cache is None else key_cache, np.full(12, 99, "uint8")]
    scalars = {"num_tokens": 2, "num_slots": num_slots, "block_size": 2, "slot_stride": 1}
    for name in ("key", "value"):
        scalars |= {f"{name}_size": 3, f"{name}_token": 3, f"{name}_head": 3, f"{name}_word": 1}
        scalars |= {f"{name}_cache_block": 6, f"{name}_cache_offset": 3}
        scalars |= {f"{name}_cache_head": 3, f"{name}_cache_word": 1}
    pointers = [key, np.arange(6, dtype="uint8"), *caches, np.array(slots)]
    simulate(scatter_strided, [3, 1, 2], pointers, scalars_of(scatter_strided, **scalars), [3, 1, 1])
    return caches[0].tolist()


def test_scatter_strided_by_itself():
    assert strided([3, -1]) == [99] * 9 + [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"num_slots": 5, "slots": [4, 0]}, "12 of <pointer to element 0 of 12 uint8>"),
        ({"key": np.arange(5, dtype="uint8"), "slots": [0, 1]}, "5 of <pointer to element 0 of 5 uint8>"),
        (
            {"key_cache": Pointer(np.zeros(12, "uint8"), 1), "slots": [0, 3]},
            "11 of <pointer to element 1 of 12 uint8>",
        ),
    ],
    ids=["guard too wide", "row too short", "pointer moved"],
)
def test_a_step_outside_of_the_memory_raises(change, place):
    with refused(IndexError, f"index {place} lies outside of its memory"):
        strided(**change)


def test_negative_indices_never_wrap():
    """Before the start of the memory is an error; before the pointer's own place is not."""
    memory = np.arange(5)
    assert Pointer(memory, 2)[-2] == 0
    for start, index in ((0, -1), (2, -3), (2, np.int64(-(2**40)))):
        with pytest.raises(IndexError):
            Pointer(memory, start)[index]
        with pytest.raises(IndexError):
            Pointer(memory, start)[index] = 7
    assert memory.tolist() == [0, 1, 2, 3, 4]


def double(item: "item[1]", data: "float32*", factor: "float32", size: "int64"):
    if item.get_id(0) < size:
        data[item.get_id(0)] *= factor


def test_scalars_have_the_kernels_types():
    data = np.ones(4, "float32")
    simulate(double, [16], [data], [0.1, 3])
    assert data.tolist() == [np.float32(0.1)] * 3 + [1]


def test_arguments_are_checked():
    data = np.ones((2, 4), "float32")
    with refused(TypeError, "double takes 3 arguments (data, factor, size), got 2"):
        simulate(double, [16], [data], [2])
    with refused(TypeError, "`data` must be float32, got int32"):
        simulate(double, [16], [data.view("int32")], [2, 1])
    with refused(ValueError, "`data` must be contiguous or a Pointer, got strides [16, 8]"):
        simulate(double, [16], [data[:, ::2]], [2, 1])
    with refused(ValueError, "`global_size` must have 1 axes for double, got [16, 2]"):
        simulate(double, [16, 2], [data], [2, 1])
    with refused(ValueError, "`global_size` must be whole work-groups of [8], got [12]"):
        simulate(double, [12], [data], [2, 1], [8])
    with pytest.raises(ValueError, match=r"^`memory` must be one-dimensional and contiguous, got shape"):
        Pointer(data)
    assert (data == 1).all()


def reverse(item: "nditem[2]", data: "int32*", largest: "int32*"):
    """Reverse each work-group's part of a row; the largest of the group goes into `largest`."""
    lane = item.get_local_id(0)
    lanes = item.get_local_range(0)
    at = item.get_global_id(1) * 8 + item.get_global_id(0)
    device.put_local(lane, data[at])
    device.barrier()
    data[at] = device.get_local(lanes - 1 - lane)
    peak = device.group_larger(data[at])
    if lane == 0:
        largest[item.get_global_id(1) * 2 + item.get_group().get_group_id(0)] = peak


def test_work_groups_run_together():
    data = np.arange(16, dtype="int32")
    largest = np.zeros(4, "int32")
    simulate(reverse, [8, 2], [data, largest], local_size=[4, 1])
    assert data.tolist() == [3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12]
    assert largest.tolist() == [3, 7, 11, 15]


def test_an_error_in_one_item_ends_its_group():
    """The others wait at a barrier; they are let go, and the item's own error is the one that is raised."""

    def broken(item: "nditem[1]", data: "int32*"):
        if item.get_local_id(0) == 2:
            data[99] = 0
        device.barrier()

    with pytest.raises(IndexError, match=r"^index 99 of"):
        simulate(broken, [4], [np.zeros(4, "int32")], local_size=[4])


def test_local_memory_starts_empty():
    """Reading what no item of the group has written is an error, not a zero."""

    def careless(item: "nditem[1]", data: "int32*"):
        data[0] = device.get_local(item.get_local_id(0))

    with refused(IndexError, "word 0 of the work-group is read, but nothing was put there"):
        simulate(careless, [1], [np.zeros(4, "int32")], local_size=[1])
