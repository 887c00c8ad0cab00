# ruff: noqa: F722, F821  (annotations are the kernel's argument types)
"""The simulator: kernels as plain Python, with every access checked."""

import re

import numpy as np
import pytest

from kvcache_dpex.kernels.dequantize_strided import dequantize_strided
from kvcache_dpex.kernels.intrinsics import barrier, get_local, group_max, put_local
from kvcache_dpex.kernels.quantize_strided import quantize_strided
from kvcache_dpex.kernels.scatter_cpu import scatter_cpu
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.kernels.scatter_strided import scatter_strided
from kvcache_dpex.kernels.views import load, row_from, store
from kvcache_dpex.runtime.compile import parameters
from kvcache_dpex.runtime.compile.memory import Pointer, View
from kvcache_dpex.runtime.compile.simulate import Item, simulate


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def scalars_of(kernel, strides, **values):
    """A kernel's strides and numbers in its own order, by name."""
    found = []
    for name, text in list(kernel.__annotations__.items())[1:]:
        parameter = parameters.parse(parameters.bind(text, {"step": "any"}))
        found += strides[name][: parameter.num_strides] if parameter.kind == "view" else [values[name]]
    return found


@pytest.mark.parametrize(("kernel", "row"), [(scatter_gpu, 2), (scatter_cpu, 4)])
def test_whole_rows(kernel, row):
    """Rows of four 8-byte words, three tokens, a cache of two slots and slots given as 1, -1, 0."""
    key = np.arange(12, dtype="uint64")
    caches = np.zeros((2, 8), "uint64")
    pointers = [key, key + np.uint64(100), caches[0], caches[1], np.array([1, -1, 0], "int32")]
    strides = dict.fromkeys(("key", "value", "key_cache", "value_cache"), (row, 1))
    scalars = scalars_of(kernel, {**strides, "slot_mapping": (1,)}, num_tokens=3, row=row, num_slots=2)
    simulate(kernel, [row, 4], pointers, scalars, [row, 1])
    assert caches[0].tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    assert caches[1].tolist() == [108, 109, 110, 111, 100, 101, 102, 103]


def strided(slots, *, key_cache=None, key=None, num_slots=4):
    """scatter_strided over two tokens of one head of three bytes; four slots in blocks of two."""
    key = np.arange(6, dtype="uint8") if key is None else key
    caches = [np.full(12, 99, "uint8") if key_cache is None else key_cache, np.full(12, 99, "uint8")]
    rows = dict.fromkeys(("key", "value"), (3, 3, 1))
    strides = {**rows, "key_cache": (6, 3, 3, 1), "value_cache": (6, 3, 3, 1), "slot_mapping": (1,)}
    sizes = {"num_tokens": 2, "num_slots": num_slots, "block_size": 2, "key_size": 3, "value_size": 3}
    pointers = [key, np.arange(6, dtype="uint8"), *caches, np.array(slots)]
    simulate(scatter_strided, [3, 1, 2], pointers, scalars_of(scatter_strided, strides, **sizes), [3, 1, 1])
    return caches[0].tolist()


def test_scatter_strided_by_itself():
    assert strided([3, -1]) == [99] * 9 + [0, 1, 2]


# The second slot of the second block, where blocks have 2**31 slots: it is beyond int32, not beyond uint32.
FAR_BLOCK, FAR_SLOT = 2**31, 2**31 + 1


def test_scatter_strided_beyond_int32():
    key = np.arange(3, dtype="uint8")
    caches = [np.full(12, 99, "uint8") for _ in range(2)]
    strides = dict.fromkeys(("key", "value"), (0, 0, 1))
    strides |= dict.fromkeys(("key_cache", "value_cache"), (6, 3, 0, 1))
    sizes = {"num_tokens": 1, "num_slots": 2**32, "block_size": FAR_BLOCK, "key_size": 3, "value_size": 3}
    scalars = scalars_of(scatter_strided, {**strides, "slot_mapping": (1,)}, **sizes)
    simulate(scatter_strided, [3, 1, 1], [key, key, *caches, np.array([FAR_SLOT])], scalars)
    for cache in caches:
        assert cache.tolist() == [99] * 9 + [0, 1, 2]


def test_quantize_strided_beyond_int32():
    row = np.arange(8, dtype="float32")
    codes = [np.full(32, 99, "int8") for _ in range(2)]
    scales = [np.zeros(4, "float32") for _ in range(2)]
    strides = dict.fromkeys(("key", "value"), (0, 0, 1))
    strides |= dict.fromkeys(("key_codes", "value_codes"), (16, 8, 0, 1))
    strides |= dict.fromkeys(("key_scales", "value_scales"), (2, 1, 0))
    sizes = {"num_slots": 2**32, "block_size": FAR_BLOCK, "key_size": 8, "value_size": 8, "lanes": 1}
    scalars = scalars_of(quantize_strided, {**strides, "slot_mapping": (1,)}, **sizes)
    pointers = [row, row, *codes, *scales, np.array([FAR_SLOT])]
    simulate(quantize_strided, [1, 1, 1], pointers, scalars, [1, 1, 1])
    for found, scale in zip(codes, scales):
        assert (found[:24] == 99).all()
        assert found[31] == 127
        assert scale.tolist() == [0, 0, 0, np.float32(7 / 127)]


def test_dequantize_strided_beyond_int32():
    """One item by itself, since an index space of so many would take hours."""
    codes, scales, out = np.arange(4, dtype="int8"), np.full(4, 0.5, "float32"), np.zeros(4, "float32")
    memories = {"codes": codes, "scales": scales, "out": out, "blocks": np.zeros(1, "int64")}
    views = {
        name: View(parameters.parse(text), Pointer(memories[name]), strides)
        for name, text, strides in (
            ("codes", "int8[block, offset, head, element]", (2, 1, 0, 0)),
            ("scales", "float32[block, offset, head]", (2, 1, 0)),
            ("blocks", "int64[n]", (1,)),
            ("out", "float32[n, offset, head, element]", (2, 1, 0, 0)),
        )
    }
    numbers = {"listed": 0, "num_blocks": 2, "num_slots": 2**32, "block_size": FAR_BLOCK, "head_size": 1}
    dequantize_strided(
        Item([0, 0, FAR_SLOT], [1, 1, 1]),
        **views,
        **{name: np.int64(number) for name, number in numbers.items()},
    )
    assert out.tolist() == [0, 0, 0, 1.5]


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
    with refused(
        TypeError, "double takes 3 pointers and numbers for its arguments (data, factor, size), got 2"
    ):
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
    put_local(lane, data[at])
    barrier()
    data[at] = get_local(lanes - 1 - lane)
    peak = group_max(data[at])
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
        barrier()

    with pytest.raises(IndexError, match=r"^index 99 of"):
        simulate(broken, [4], [np.zeros(4, "int32")], local_size=[4])


def test_local_memory_starts_empty():
    """Reading what no item of the group has written is an error, not a zero."""

    def careless(item: "nditem[1]", data: "int32*"):
        data[0] = get_local(item.get_local_id(0))

    with refused(IndexError, "word 0 of the work-group is read, but nothing was put there"):
        simulate(careless, [1], [np.zeros(4, "int32")], local_size=[1])


def view_of(text, memory, *strides):
    return View(parameters.parse(text), Pointer(memory), strides)


def test_views_of_vectors_and_rows():
    """Indices count vectors along the last axis; a tuple of them loads or stores one element for each."""
    memory = np.arange(12, dtype="int32")
    pairs = view_of("int32*2[row, pair=1]", memory, 3)
    assert load(pairs, 1, 2) == (10, 11)
    assert load(pairs, 1, (0, 2)) == ((6, 7), (10, 11))
    store(pairs, ((-1, -2), (-3, -4)), 0, (1, 0))
    assert memory[:4].tolist() == [-3, -4, -1, -2]
    columns = view_of("int32[row, column]", memory, 4, 2)
    assert load(row_from(columns, 1, 1), (-1, 0)) == (4, 6)


def test_vectors_are_aligned_to_their_size():
    """Intel's compiler moves 16 bytes at a time; at other addresses, hardware may not."""
    memory = np.zeros(12, "float32")
    assert memory.ctypes.data % 16 == 0
    view = View(parameters.parse("float32*4[part=1]"), Pointer(memory, 2), [])
    with pytest.raises(ValueError, match=r"^vector 1 of 4 at <pointer to element 2 .* is not aligned"):
        load(view, 1)
    with pytest.raises(ValueError, match="is not aligned"):
        store(view, (1, 2, 3, 4), 0)
    assert (memory == 0).all()


def test_views_check_indices_and_values():
    memory = np.zeros(8, "float32")
    view = view_of("float32*2[row, pair=1]", memory, 2)
    with refused(IndexError, "a view of axes ['row', 'pair'] takes as many indices, got 1"):
        load(view, 1)
    with refused(ValueError, "2 values are stored at once, got 3"):
        store(view, (1, 2, 3), 0, 0)
    with pytest.raises(IndexError, match="lies outside of its memory"):
        load(view, 1, 2)
    assert (memory == 0).all()


@pytest.mark.parametrize("text", ["float32[row=1, element]", "float32[row, element=2]", "[row]", "float32[]"])
def test_an_annotation_that_says_nothing_is_refused(text):
    with pytest.raises(ValueError, match="got '"):
        parameters.parse(text)


def scaled(item: "item[1]", data: "value[element=step]", factor: "factor", size: "int64"):
    if item.get_id(0) < size:
        store(data, load(data, item.get_id(0)) * np.float32(factor), item.get_id(0))


def test_constants_and_steps_are_part_of_the_type():
    texts = [
        parameters.bind(text, {"value": "float32", "factor": 3, "step": "1"})
        for text in ("value[element=step]", "factor", "int64")
    ]
    assert texts == ["float32[element=1]", "3", "int64"]
    assert parameters.flattened(texts) == ("float32*", "int64")
    data = np.ones(4, "float32")
    simulate(scaled, [4], [data], [3], types={"factor": 3, "step": "1"})
    assert data.tolist() == [3, 3, 3, 1]
    simulate(scaled, [4], [data], [2, 2], types={"factor": 2})
    assert data.tolist() == [6, 3, 6, 1]
