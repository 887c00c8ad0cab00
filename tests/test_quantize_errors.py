"""What reshape_and_cache_quant says when an argument is wrong; nothing is then written."""

import re

import numpy as np
import pytest

from helpers import SENTINEL, sentinel, to_bytes, to_device
from kvcache_dpex import reshape_and_cache_quant
from kvcache_dpex.ops import quantize
from kvcache_dpex.runtime.launch import arrays

OUTPUTS = ["kq", "vq", "ks", "vs"]
DEVICE = "<device>"  # stands for the device's name in the messages below
ROWS = "[num_tokens, num_kv_heads, head_size]"
BLOCKS = "[num_blocks, block_size, num_kv_heads, head_size]"
FLOATS = "must be float32, float16, or bfloat16 (bits as uint16, with dtype='bfloat16')"
SCALES = "must have shape [num_blocks * block_size, num_kv_heads] = [20, 2]"


@pytest.fixture
def new(queue):
    """Makes an array of the device, filled with the sentinel."""

    def make(*shape, dtype="float32", queue=queue):
        return to_device(sentinel(shape, dtype), queue)

    return make


@pytest.fixture
def arguments(new, queue):
    """A write that works: 6 tokens, 2 heads of 16, 5 blocks of 4 slots."""
    return {
        "key": new(6, 2, 16),
        "value": new(6, 2, 16),
        "kq": new(5, 4, 2, 16, dtype="int8"),
        "vq": new(5, 4, 2, 16, dtype="int8"),
        "ks": new(20, 2),
        "vs": new(20, 2),
        "slot_mapping": to_device(np.arange(6), queue),
    }


def assert_refused(arguments, error, message, queue, **options):
    """The same error each time, with exactly this text, and outputs as they were."""
    message = message.replace(DEVICE, queue.sycl_device.name)
    for _ in range(2):
        with pytest.raises(error, match=f"^{re.escape(message)}$") as raised:
            reshape_and_cache_quant(**arguments, **options)
        assert type(raised.value) is error
    for name in OUTPUTS:
        if hasattr(arguments[name], "sycl_queue"):
            assert (to_bytes(arguments[name]) == SENTINEL).all()


def test_the_arguments_are_right_otherwise(arguments):
    reshape_and_cache_quant(**arguments)
    assert not any((to_bytes(arguments[name]) == SENTINEL).all() for name in OUTPUTS)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("key", (6, 32), f"`key` must have shape {ROWS}, got [6, 32]"),
        ("value", (6, 32), f"`value` must have shape {ROWS}, got [6, 32]"),
        ("value", (5, 2, 16), "`value` must have the 6 tokens and 2 heads of `key`, got [5, 2, 16]"),
        ("value", (6, 1, 16), "`value` must have the 6 tokens and 2 heads of `key`, got [6, 1, 16]"),
        ("kq", (20, 2, 16), f"`kq` must have shape {BLOCKS}, got [20, 2, 16]"),
        ("vq", (20, 32), f"`vq` must have shape {BLOCKS}, got [20, 32]"),
        ("kq", (5, 4, 2, 8), "`kq` holds rows of 2 heads of 8, but `key` has 2 heads of 16"),
        ("vq", (5, 4, 4, 16), "`vq` holds rows of 4 heads of 16, but `value` has 2 heads of 16"),
        ("vq", (4, 5, 2, 16), "`vq` must have the 5 blocks of 4 slots of `kq`, got 4 blocks of 5"),
        ("ks", (5, 2), f"`ks` {SCALES} for `kq`, got [5, 2]"),
        ("ks", (2, 20), f"`ks` {SCALES} for `kq`, got [2, 20]"),
        ("ks", (20, 2, 1), f"`ks` {SCALES} for `kq`, got [20, 2, 1]"),
        ("vs", (40,), f"`vs` {SCALES} for `vq`, got [40]"),
        ("vs", (4, 5, 2), f"`vs` {SCALES} for `vq`, got [4, 5, 2]"),
        ("slot_mapping", (7,), "`slot_mapping` must have at most one slot for each of the 6 tokens, got 7"),
        ("slot_mapping", (6, 1), "`slot_mapping` must have shape [num_tokens], got [6, 1]"),
    ],
)
def test_shapes(arguments, new, queue, name, shape, message):
    arguments[name] = new(*shape, dtype=arguments[name].dtype)
    assert_refused(arguments, ValueError, message, queue)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("key", "int8", f"`key` {FLOATS}, got int8"),
        ("key", "uint16", f"`key` {FLOATS}, got uint16"),
        ("key", "complex64", f"`key` {FLOATS}, got complex64"),
        ("value", "float16", "`value` must have the dtype of `key`, float32, got float16"),
        (
            "kq",
            "uint8",
            "`kq` must be int8, float8_e4m3fn, or uint8 with format='fp8_per_token_head', got uint8",
        ),
        (
            "vq",
            "float32",
            "`vq` must be int8, float8_e4m3fn, or uint8 with format='fp8_per_token_head', got float32",
        ),
        ("ks", "float16", "`ks` must be float32, got float16"),
        ("vs", "int32", "`vs` must be float32, got int32"),
        ("slot_mapping", "float32", "`slot_mapping` must be int32 or int64, got float32"),
        ("slot_mapping", "uint32", "`slot_mapping` must be int32 or int64, got uint32"),
    ],
)
def test_dtypes(arguments, new, queue, name, dtype, message):
    arguments[name] = new(*arguments[name].shape, dtype=dtype)
    assert_refused(arguments, TypeError, message, queue)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("float32", "bfloat16"),
        ("float16", "bfloat16"),
        ("uint16", "float16"),
        ("float32", "float16"),
        ("uint16", "uint16"),
        ("int16", "bfloat16"),
        ("float32", np.float64),
    ],
)
def test_what_the_values_are_said_to_be(arguments, new, queue, given, dtype):
    for name in ("key", "value"):
        arguments[name] = new(6, 2, 16, dtype=given)
    message = f"`key` {FLOATS}, got {given} with dtype={dtype!r}"
    assert_refused(arguments, TypeError, message, queue, dtype=dtype)


@pytest.mark.parametrize(("name", "other"), [("vq", "kq"), ("vs", "ks")])
def test_memory_of_another_output(arguments, queue, name, other):
    arguments[name] = arguments[other]
    assert_refused(arguments, ValueError, f"`{name}` must not be the memory of `{other}`", queue)


@pytest.mark.parametrize("name", OUTPUTS)
def test_elements_that_share_memory(arguments, queue, name):
    array = arguments[name]
    strides = (0, *array.strides[1:])
    arguments[name] = arrays.tensor_module().usm_ndarray(
        array.shape, dtype=array.dtype, buffer=array.usm_data, strides=strides
    )
    message = (
        f"`{name}` is written, so its elements must not share memory, got strides {list(strides)}; "
        "copy the broadcast array first"
    )
    assert_refused(arguments, ValueError, message, queue)


@pytest.mark.parametrize("name", OUTPUTS)
def test_read_only_outputs(arguments, queue, name):
    arguments[name].flags["W"] = False
    assert_refused(arguments, ValueError, f"`{name}` must be writable, got a read-only array", queue)


@pytest.mark.parametrize("name", ["key", "value", *OUTPUTS, "slot_mapping"])
def test_what_is_no_array_of_the_device(arguments, queue, name):
    arguments[name] = np.zeros(3)
    message = (
        f"`{name}` must be a dpnp array, a usm_ndarray or a torch.Tensor, got numpy.ndarray; "
        "dpnp.asarray makes an array of the device"
    )
    assert_refused(arguments, TypeError, message, queue)


@pytest.mark.parametrize("name", ["value", *OUTPUTS, "slot_mapping"])
def test_another_queue(arguments, new, queue, name):
    """dpctl #688: the message names both arguments."""
    import dpctl

    array = arguments[name]
    arguments[name] = new(*array.shape, dtype=array.dtype, queue=dpctl.SyclQueue(queue.sycl_device))
    message = (
        f"`{name}` must be on the queue of `key` ({DEVICE}), got another one ({DEVICE}); "
        f"move it with {name}.to_device(key.sycl_queue)"
    )
    assert_refused(arguments, ValueError, message, queue)


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ([3, -1, 20, 21], IndexError, "`slot_mapping[2]` must be < 20 (num_blocks * block_size), got 20"),
        ([3, -1, 5, 3], ValueError, "`slot_mapping[3]` is slot 3, which token 0 writes already"),
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_checked_slots(arguments, queue, slots, dtype, error, message):
    arguments["slot_mapping"] = to_device(np.array(slots, dtype), queue)
    assert_refused(arguments, error, message, queue, check_slots=True)


@pytest.mark.parametrize("blocks", [2**28, 2**29, 1])
def test_too_many_slots_for_the_general_kernel(queue, blocks):
    """2**32 slots and more: no memory is needed to see that the general kernel could not divide them."""
    size = 2**32 if blocks == 1 else 16
    rows = arrays.Operand((1, 1, 3), (3, 3, 1), np.dtype("float32"), queue)
    codes = arrays.Operand((blocks, size, 1, 3), (3 * size, 3, 3, 1), np.dtype("int8"), queue)
    scales = arrays.Operand((blocks * size, 1), (1, 1), np.dtype("float32"), queue)
    slots = arrays.Operand((1,), (1,), np.dtype("int64"), queue)
    message = (
        "`kq` must have fewer than 2**32 slots unless its heads are contiguous multiples of 16 values, "
        f"got {blocks} blocks of {size}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        quantize._plan(rows, rows, codes, codes, scales, scales, slots, None, None, False, alignment=1)


def test_heads_too_large_for_a_work_group(arguments, new, queue, monkeypatch):
    """numba-dpex #1308: eight values an item are the most."""
    monkeypatch.setattr(quantize, "group_limit", lambda device: 64)
    for name in ("key", "value", "kq", "vq"):
        arguments[name] = new(*arguments[name].shape[:-1], 513, dtype=arguments[name].dtype)
    message = f"`key` and `value` must have heads of at most 512 values on {DEVICE}, got 513"
    assert_refused(arguments, ValueError, message, queue)
