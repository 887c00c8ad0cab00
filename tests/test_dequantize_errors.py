"""What dequant_cache says when an argument is wrong; nothing is then written."""

import re

import numpy as np
import pytest

from helpers import SENTINEL, sentinel, to_bytes, to_device
from kvcache_dpex import dequant_cache
from kvcache_dpex.ops import dequantize
from kvcache_dpex.runtime.launch import arrays

SHAPE = "[num_blocks, block_size, num_kv_heads, head_size]"


@pytest.fixture
def working(queue):
    """Arguments that work: 5 blocks of 4 slots, 2 heads of 8."""
    return {
        "q": to_device(sentinel((5, 4, 2, 8), "int8"), queue),
        "scales": to_device(sentinel((20, 2), "float32"), queue),
        "out": to_device(sentinel((5, 4, 2, 8), "float32"), queue),
        "blocks": to_device(np.arange(5), queue),
    }


@pytest.mark.parametrize(
    ("changed", "options", "error", "message"),
    [
        (
            {"q": "uint8"},
            {},
            TypeError,
            "`q` must be int8, float8_e4m3fn, float8_e5m2, or uint8 with format='fp8_per_token_head' or "
            "'fp8_e4m3' or 'fp8_e5m2', got uint8",
        ),
        ({"q": (20, 2, 8)}, {}, ValueError, f"`q` must have shape {SHAPE}, got [20, 2, 8]"),
        ({"scales": "float16"}, {}, TypeError, "`scales` must be float32, got float16"),
        (
            {"scales": (10, 2)},
            {},
            ValueError,
            "`scales` must have shape [num_blocks * block_size, num_kv_heads] = [20, 2] for `q`, got [10, 2]",
        ),
        (
            {"out": (4, 4, 2, 8)},
            {},
            ValueError,
            "`out` must have shape [5, 4, 2, 8], got [4, 4, 2, 8]",
        ),
        (
            {"out": (5, 4, 2, 8), "blocks": (2, 3)},
            {},
            ValueError,
            "`out` must have shape [2, 3, 4, 2, 8], got [5, 4, 2, 8]",
        ),
        (
            {"out": "int32"},
            {},
            TypeError,
            "`out` must be float32, float16, or bfloat16 (bits as uint16, with dtype='bfloat16'), got int32",
        ),
        (
            {"out": "float16"},
            {"dtype": "float32"},
            TypeError,
            "`out` must be float32, float16, or bfloat16 (bits as uint16, with dtype='bfloat16'), "
            "got float16 with dtype='float32'",
        ),
        ({"blocks": "float32"}, {}, TypeError, "`blocks` must be int32 or int64, got float32"),
        ({"blocks": "uint32"}, {}, TypeError, "`blocks` must be int32 or int64, got uint32"),
    ],
)
def test_errors(queue, changed, options, error, message):
    arguments = {"q": ((5, 4, 2, 8), "int8"), "scales": ((20, 2), "float32")}
    usual = {**arguments, "out": ((5, 4, 2, 8), "float32"), "blocks": ((5,), "int64")}
    for name, change in changed.items():
        shape, dtype = usual[name]
        arguments[name] = (shape, change) if isinstance(change, str) else (change, dtype)
    device = {name: to_device(sentinel(*each), queue) for name, each in arguments.items()}
    for _ in range(2):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            dequant_cache(**device, **options)
    assert "out" not in device or (to_bytes(device["out"]) == SENTINEL).all()


@pytest.mark.parametrize("dtype", ["int8", "float64", np.float64, "uint16", "float31", 7], ids=str)
def test_dtypes_that_nothing_is_decoded_to(working, dtype):
    message = f"`dtype` must be float32, float16 or bfloat16, got {dtype!r}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        dequant_cache(working["q"], working["scales"], dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), "float16"], ids=repr)
def test_dtypes_that_are_no_names(working, queue, dtype):
    out = to_device(sentinel((5, 4, 2, 8), "float16"), queue)
    assert dequant_cache(working["q"], working["scales"], dtype=dtype).dtype == np.float16
    assert dequant_cache(working["q"], working["scales"], out=out, dtype=dtype) is out


def test_tables_that_are_not_evenly_spaced(working, queue):
    table = to_device(np.zeros((2, 3), "int32"), queue)
    message = "`blocks` must have evenly spaced blocks, got strides [1, 3] for [3, 2]; copy it first"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dequant_cache(working["q"], working["scales"], blocks=table.T)


def test_a_table_of_no_columns_is_evenly_spaced(working, queue):
    """A slice keeps the strides of the whole table."""
    table = to_device(np.zeros((2, 3), "int32"), queue)
    found = dequant_cache(working["q"], working["scales"], blocks=table[:, :0])
    assert found.shape == (2, 0, *working["q"].shape[1:])


def test_results_that_are_not_evenly_spaced(working, queue):
    out = to_device(sentinel((2, 3, 4, 2, 8), "float32"), queue)[:, :2]
    table = to_device(np.zeros((2, 2), "int32"), queue)
    message = "`out` must have evenly spaced blocks, got strides [192, 64] for [2, 2]; copy it first"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dequant_cache(working["q"], working["scales"], blocks=table, out=out)


@pytest.mark.parametrize("name", ["scales", "out", "blocks"])
def test_another_queue(working, queue, name):
    """dpctl #688: the message names both arguments."""
    import dpctl

    working[name] = to_device(arrays.to_numpy(working[name]), dpctl.SyclQueue(queue.sycl_device))
    with pytest.raises(ValueError, match=rf"^`{name}` must be on the queue of `q` \("):
        dequant_cache(**working)
    assert (to_bytes(working["out"]) == SENTINEL).all()


@pytest.mark.parametrize("name", ["q", "scales", "out", "blocks"])
def test_what_is_no_array_of_the_device(working, name):
    working[name] = np.zeros(3)
    with pytest.raises(
        TypeError, match=rf"^`{name}` must be a dpnp array, .* got numpy\.ndarray; dpnp\.asarray"
    ):
        dequant_cache(**working)


def test_read_only_results_and_shared_elements(working):
    out = working["out"]
    strides = (0, *out.strides[1:])
    tensor = arrays.tensor_module()
    working["out"] = tensor.usm_ndarray(out.shape, "f4", buffer=out.usm_data, strides=strides)
    with pytest.raises(ValueError, match=r"^`out` is written, so its elements must not share memory, "):
        dequant_cache(**working)
    working["out"].flags["W"] = False
    with pytest.raises(ValueError, match=r"^`out` must be writable, got a read-only array$"):
        dequant_cache(**working)


@pytest.mark.parametrize("blocks", [2**28, 2**29, 1])
def test_too_many_slots_for_the_general_kernel(queue, blocks):
    """2**32 slots and more: no memory is needed to see that the general kernel could not divide them."""
    size = 2**32 if blocks == 1 else 16
    codes = arrays.Operand((blocks, size, 1, 3), (3 * size, 3, 3, 1), np.dtype("int8"), queue)
    scales = arrays.Operand((blocks * size, 1), (1, 1), np.dtype("float32"), queue)
    out = arrays.Operand(codes.shape, codes.strides, np.dtype("float32"), queue)
    message = f"`out` must have fewer than 2**32 slots, got {blocks * size}; decode fewer blocks"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dequantize._plan(codes, scales, None, None, out, None, alignment=1)
