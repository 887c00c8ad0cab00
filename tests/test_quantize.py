"""reshape_and_cache_quant against the reference: dtypes, sizes, slots; whole caches over a sentinel fill."""

import numpy as np
import pytest

from helpers import sentinel, to_device
from kvcache_dpex import reference, reshape_and_cache_quant
from kvcache_dpex.ops import quantize
from kvcache_dpex.runtime.launch import arrays
from quantizing import VALUES, check_quantize, option, quantize_case, rows_of, stored

SLOTS = [7, -1, 0, 19, 8]
SIZES = [1, 3, 46, 64, 80, 96, 112, 120, 128, 192, 256, 576, 1025]
# Which kernels take rows of a size.
CHOICES = [("any", size) for size in SIZES]
CHOICES += [("quantize_strided", size) for size in SIZES if size >= 8]
CHOICES += [
    (name, size)
    for name in ("quantize_gpu", "quantize_cpu")
    for size in SIZES
    if size % 16 == 0 and size <= 512
]
# Compiling every kernel once is enough; `test_every_dtype` does.
no_compiler = pytest.mark.parametrize("runner", ["plain", "packaged"], indirect=True)


def slots_of(values, dtype="int64"):
    return np.array(values, dtype)


@pytest.fixture
def rng():
    return np.random.default_rng(30)


@pytest.mark.parametrize("size", [32, 3])
@pytest.mark.parametrize(
    ("dtype", "slot_dtype"), [("float32", "int64"), ("float16", "int32"), ("bfloat16", "int64")]
)
def test_every_dtype(runner, kernel, queue, rng, dtype, size, slot_dtype):
    check_quantize(queue, *quantize_case(rng, dtype, size=size), slots_of(SLOTS, slot_dtype), **option(dtype))


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize(("kernel", "size"), CHOICES, indirect=["kernel"])
def test_every_head_size(request, kernel, queue, rng, size, dtype):
    """vllm #41257: rows that are no multiple of a vector; every slot of a 3-block cache is written."""
    for heads, slot_dtype in ((1, "int64"), (2, "int32"), (13, "int64")):
        case = quantize_case(rng, dtype, blocks=3, block_size=2, heads=heads, size=size)
        check_quantize(queue, *case, slots_of(rng.permutation(6), slot_dtype), **option(dtype))
    name = request.node.callspec.params["kernel"]
    takes = name != "any" and (name, dtype) != ("quantize_cpu", "float16")
    assert kernel == [name if takes else "quantize_strided"] * 3


@pytest.mark.parametrize("size", SIZES)
def test_the_device_s_own_choice(queue, rng, size):
    case = quantize_case(rng, "float32", blocks=3, block_size=2, size=size)
    check_quantize(queue, *case, slots_of(rng.permutation(6)))


@pytest.mark.parametrize(("size", "value_size"), [(16, 8), (8, 16), (192, 128), (3, 46), (576, 1)])
@pytest.mark.parametrize("dtype", VALUES)
@no_compiler
def test_value_has_a_head_size_of_its_own(runner, queue, rng, dtype, size, value_size):
    if runner == "plain" and size > 16:
        size, value_size = size // 8, value_size // 8 or 1
    case = quantize_case(rng, dtype, size=size, value_size=value_size)
    check_quantize(queue, *case, slots_of(SLOTS), **option(dtype))


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_every_block_size(kernel, queue, rng, block_size, axes):
    case = quantize_case(rng, "float32", blocks=3, block_size=block_size, tokens=3, axes=axes)
    check_quantize(queue, *case, slots_of([3 * block_size - 1, block_size, block_size - 1]))


@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (1, 300), (3, 43), (8, 17), (130, 2)])
@pytest.mark.parametrize("size", [16, 48, 512])
def test_work_groups_that_are_not_full(kernel, queue, rng, size, heads, tokens):
    """Lanes of a row share a work-group with other heads and tokens, and with places where there are none."""
    case = quantize_case(rng, "bfloat16", blocks=20, block_size=16, heads=heads, size=size, tokens=tokens)
    check_quantize(queue, *case, slots_of(rng.permutation(320)[:tokens] - 3), dtype="bfloat16")


@pytest.mark.parametrize("runner", ["plain"], indirect=True)
@pytest.mark.parametrize("kernel", ["quantize_gpu", "quantize_cpu"], indirect=True)
def test_items_without_a_row_read_inside_of_the_rows(runner, kernel, queue, rng):
    """Five heads, where a work-group takes four; plain Python checks every access."""
    case = quantize_case(rng, "float32", blocks=1, heads=5, size=512, tokens=1)
    check_quantize(queue, *case, slots_of([2]))
    assert kernel[0] != "quantize_strided"


@pytest.mark.parametrize("size", [16, 3])
@no_compiler
def test_three_different_sizes_stay_in_their_order(runner, kernel, queue, rng, size):
    """numba-dpex #889: tokens, heads and head size all differ, so exchanged axes would show."""
    case = quantize_case(rng, "float32", blocks=2, block_size=3, heads=5, size=size, tokens=3)
    check_quantize(queue, *case, slots_of([4, 0, 3]))


@no_compiler
@pytest.mark.parametrize(
    ("slot", "dtype"),
    [
        (-1, "int32"),
        (-20, "int32"),
        (-(2**31), "int32"),
        (20, "int32"),
        (2**31 - 1, "int32"),
        (-(2**63), "int64"),
        (-(2**32) + 3, "int64"),
        (20, "int64"),
        (2**31, "int64"),
        (2**32 + 3, "int64"),
        (2**63 - 1, "int64"),
    ],
)
def test_slots_outside_of_the_cache_are_never_written(runner, kernel, queue, rng, slot, dtype):
    """vllm #43810: every negative skips, as does every slot from 5 * 4 on; their neighbours are written."""
    check_quantize(queue, *quantize_case(rng, "float32"), slots_of([2, slot, 3], dtype))


@no_compiler
@pytest.mark.parametrize("given", [0, 1, 5])
def test_surplus_rows_are_ignored(runner, kernel, queue, rng, given):
    """vllm #13922: fewer slots than rows, as when rows are padded for a replay."""
    case = quantize_case(rng, "float32", tokens=8)
    check_quantize(queue, *case, slots_of([9, 3, 17, 0, 4][:given]))


@no_compiler
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("step", [slice(None, None, 2), slice(None, None, -1), slice(5, None, -3)])
def test_slots_of_any_stride(runner, kernel, queue, rng, step, dtype):
    slots = slots_of([3, 1, 19, 5, 0, 12], dtype)[step]
    check_quantize(queue, *quantize_case(rng, "float32"), slots)


@pytest.mark.parametrize(
    ("blocks", "tokens", "slots"),
    [(5, 0, []), (0, 0, []), (0, 3, [0, 1, -1]), (5, 3, []), (5, 3, [-1, -2, -3]), (5, 3, [20, 21, 22])],
)
@pytest.mark.parametrize("size", [16, 3])
def test_nothing_to_do(kernel, queue, rng, blocks, tokens, slots, size):
    """intel/llvm #1708: no tokens, no blocks, no slot inside."""
    case = quantize_case(rng, "float32", blocks=blocks, tokens=tokens, size=size)
    check_quantize(queue, *case, slots_of(slots))


@pytest.mark.parametrize("size", [576, 4224])
@pytest.mark.parametrize("kernel", ["quantize_gpu", "quantize_cpu"], indirect=True)
def test_heads_beyond_512_values_take_the_general_kernel(kernel, queue, rng, size):
    """Their lanes would take more local memory and larger work-groups than every device has."""
    check_quantize(queue, *quantize_case(rng, "float32", heads=1, size=size), slots_of(SLOTS))
    assert kernel == ["quantize_strided"]


@pytest.mark.parametrize(("size", "limit"), [(128, 64), (260, 64), (512, 64), (1025, 256), (2048, 256)])
def test_group_limits(kernel, queue, rng, monkeypatch, size, limit):
    """numba-dpex #1308: heads of many values, where a work-group may have few items."""
    monkeypatch.setattr(quantize, "group_limit", lambda device: limit)
    check_quantize(queue, *quantize_case(rng, "float16", size=size), slots_of(SLOTS))


@pytest.mark.parametrize("size", [16, 3])
@no_compiler
def test_rows_of_zeros_replace_what_was_there(runner, kernel, queue, size):
    """Codes 99 and scales -7 go, also under zeros and negative zeros; the neighbours are exact.

    kernels-community #680.
    """
    rows = np.ones((3, 2, size), "f4")
    rows[1] = np.array([0.0, -0.0])[:, None]
    codes = [np.full((1, 4, 2, size), 99, "int8") for _ in range(2)]
    scales = [np.full((4, 2), -7, "f4") for _ in range(2)]
    check_quantize(queue, rows, -rows, *codes, *scales, slots_of([1, 2, 3]))
    assert codes[0][0, :, 0, 0].tolist() == [99, 127, 0, 127]
    assert (codes[1][0, :, 1] == np.array([[99], [-127], [0], [-127]])).all()
    np.testing.assert_array_equal(scales[1][:, 1], np.array([-7, 1 / 127, 0, 1 / 127], "f4"))


@pytest.mark.parametrize("fault", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 32), ("float16", 3), ("bfloat16", 16)])
@no_compiler
def test_a_row_that_is_not_finite_stands_alone(runner, kernel, queue, size, dtype, fault):
    """Codes 0 and NaN or infinity as the scale; the rows around it are what they would be without it.

    pytorch/ao #4725.
    """
    row = np.resize(np.array([1, -1, 0.5], "f4"), size)
    rows = np.broadcast_to(row, (3, 2, size)).copy()
    rows[1, 1, size // 2] = fault
    found = [np.full((1, 3, 2, size), 99, "int8"), np.full((3, 2), -7, "f4")]
    other = [np.full((1, 3, 2, size), 99, "int8"), np.full((3, 2), -7, "f4")]
    arguments = stored(rows, dtype), stored(rows[::-1], dtype), found[0], other[0], found[1], other[1]
    check_quantize(queue, *arguments, slots_of([0, 1, 2]), **option(dtype))
    codes, scale = reference.quantize_row(row)
    faulty = np.zeros((3, 2), bool)
    faulty[1, 1] = True
    np.testing.assert_array_equal(found[0][0][~faulty], np.broadcast_to(codes, (5, size)))
    np.testing.assert_array_equal(found[1][~faulty], scale)
    assert not found[0][0, 1, 1].any()
    np.testing.assert_array_equal(found[1][1, 1], abs(fault))
    decoded = reference.dequant_cache(found[0], found[1])[0]
    assert np.isnan(decoded[faulty]).all()
    assert np.isfinite(decoded[~faulty]).all()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_dpnp_arrays(queue, rng, name):
    """dpnp #1649: dpnp's own strides are in elements in old releases and in bytes in new ones."""
    rows = rows_of(rng, (6, 4, 16), name)
    codes = sentinel((5, 2, 4, 2, 16), "int8")
    scales = sentinel((20, 2, 2), "float32")
    views = rows[:, :2], rows[:, 2:], codes[:, 0], codes[:, 1], scales[:, 0], scales[:, 1]
    check_quantize(queue, *views, slots_of(SLOTS), wrap=arrays.as_dpnp, **option(name))


@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
def test_checked_slots(queue, rng, slot_dtype):
    case = quantize_case(rng, "float32")
    check_quantize(queue, *case, slots_of([3, -1, 19, -1], slot_dtype), check_slots=True)


def test_elements_beyond_2_to_the_31(kernel, queue, rng):
    """vllm #1486: bytes 2**31 and up of the codes, addressed by int32 slots; only slices are read back."""
    tensor = arrays.tensor_module()
    heads, size, slot = 32, 128, 2**18
    both = tensor.empty((16385, 16, 2, heads, size), dtype="int8", sycl_queue=queue)
    codes = both[:, :, 0], both[:, :, 1]
    scales = [tensor.empty((16385 * 16, heads), dtype="float32", sycl_queue=queue) for _ in range(2)]
    near = [0, slot - 2, slot - 1, slot, slot + 1]
    for place in near:
        both[place // 16, place % 16] = 77
        for each in scales:
            each[place] = -7
    rows = [rows_of(rng, (2, heads, size), "float32") for _ in range(2)]
    slots = to_device(slots_of([slot - 1, slot], "int32"), queue)
    reshape_and_cache_quant(*(to_device(row, queue) for row in rows), *codes, *scales, slots)
    for row, code, scale in zip(rows, codes, scales):
        for place in near:
            found = [code[place // 16, place % 16], scale[place]]
            wanted = np.full((heads, size), 77, "int8"), np.full(heads, -7, "f4")
            if slot - 1 <= place <= slot:
                with np.errstate(all="ignore"):
                    pairs = [reference.quantize_row(each) for each in row[place - slot + 1]]
                wanted = np.stack([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
            for each, values in zip(found, wanted):
                np.testing.assert_array_equal(arrays.to_numpy(tensor.copy(each)), values)
