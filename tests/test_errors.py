"""What reshape_and_cache says when an argument is wrong; nothing is then written."""

import re

import numpy as np
import pytest

from helpers import SENTINEL, sentinel, to_bytes, to_device
from kvcache_dpex import reshape_and_cache
from kvcache_dpex.ops.operation import OPERATIONS
from kvcache_dpex.runtime.launch import arrays

DEVICE = "<device>"  # stands for the device's name in the messages below


@pytest.fixture
def new(queue):
    """Makes an array of the device, filled with the sentinel."""

    def make(*shape, dtype="float32", queue=queue):
        return to_device(sentinel(shape, dtype), queue)

    return make


@pytest.fixture
def arguments(new, queue):
    """A write that works: 6 tokens, 2 heads of 8, 5 blocks of 4 slots."""
    return {
        "key": new(6, 2, 8),
        "value": new(6, 2, 8),
        "key_cache": new(5, 4, 2, 8),
        "value_cache": new(5, 4, 2, 8),
        "slot_mapping": to_device(np.arange(6), queue),
    }


def assert_refused(arguments, error, message, queue, **options):
    """The same error each time, with exactly this text, and caches as they were."""
    message = message.replace(DEVICE, queue.sycl_device.name)
    for _ in range(2):
        with pytest.raises(error, match=f"^{re.escape(message)}$") as raised:
            reshape_and_cache(**arguments, **options)
        assert type(raised.value) is error
    for name in ("key_cache", "value_cache"):
        if hasattr(arguments[name], "sycl_queue"):
            assert (to_bytes(arguments[name]) == SENTINEL).all()


SHAPES = [
    ("key", (6, 16), "`key` must have shape [num_tokens, num_kv_heads, head_size], got [6, 16]"),
    (
        "key",
        (1, 2, 6, 8),
        "`key` must have shape [num_tokens, num_kv_heads, head_size], got [1, 2, 6, 8]; rows of "
        "transformers, [1, num_kv_heads, num_tokens, head_size], are key[0].swapaxes(0, 1)",
    ),
    ("key", (2, 6, 2, 8), "`key` must have shape [num_tokens, num_kv_heads, head_size], got [2, 6, 2, 8]"),
    ("key", (), "`key` must have shape [num_tokens, num_kv_heads, head_size], got []"),
    ("value", (6, 16), "`value` must have shape [num_tokens, num_kv_heads, head_size], got [6, 16]"),
    ("value", (5, 2, 8), "`value` must have the 6 tokens and 2 heads of `key`, got [5, 2, 8]"),
    ("value", (6, 4, 8), "`value` must have the 6 tokens and 2 heads of `key`, got [6, 4, 8]"),
    (
        "key_cache",
        (20, 2, 8),
        "`key_cache` must have shape [num_blocks, block_size, num_kv_heads, head_size], got [20, 2, 8]",
    ),
    (
        "value_cache",
        (20, 16),
        "`value_cache` must have shape [num_blocks, block_size, num_kv_heads, head_size], got [20, 16]",
    ),
    ("key_cache", (5, 4, 2, 9), "`key_cache` holds rows of 2 heads of 9, but `key` has 2 heads of 8"),
    ("key_cache", (5, 4, 1, 8), "`key_cache` holds rows of 1 heads of 8, but `key` has 2 heads of 8"),
    ("value_cache", (5, 4, 2, 9), "`value_cache` holds rows of 2 heads of 9, but `value` has 2 heads of 8"),
    (
        "value_cache",
        (4, 4, 2, 8),
        "`value_cache` must have the 5 blocks of 4 slots of `key_cache`, got 4 blocks of 4",
    ),
    (
        "value_cache",
        (4, 5, 2, 8),
        "`value_cache` must have the 5 blocks of 4 slots of `key_cache`, got 4 blocks of 5",
    ),
]


@pytest.mark.parametrize(("name", "shape", "message"), SHAPES)
def test_shapes(arguments, new, queue, name, shape, message):
    arguments[name] = new(*shape)
    assert_refused(arguments, ValueError, message, queue)


@pytest.mark.parametrize("name", ["key", "value"])
def test_heads_of_nothing(arguments, new, queue, name):
    arguments[name], arguments[f"{name}_cache"] = new(6, 2, 0), new(5, 4, 2, 0)
    message = f"`{name}` must have a head_size >= 1, got shape [6, 2, 0]"
    assert_refused(arguments, ValueError, message, queue)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("value", "int32", "`value` must have the dtype of `key`, float32, got int32"),
        ("key_cache", "float16", "`key_cache` must have the dtype of `key`, float32, got float16"),
        ("value_cache", "uint16", "`value_cache` must have the dtype of `key`, float32, got uint16"),
        ("slot_mapping", "float32", "`slot_mapping` must be int32 or int64, got float32"),
        ("slot_mapping", "uint64", "`slot_mapping` must be int32 or int64, got uint64"),
        ("slot_mapping", "int16", "`slot_mapping` must be int32 or int64, got int16"),
    ],
)
def test_dtypes(arguments, new, queue, name, dtype, message):
    arguments[name] = new(*arguments[name].shape, dtype=dtype)
    assert_refused(arguments, TypeError, message, queue)


def test_a_key_of_numpys_default_dtype(arguments, new, queue):
    if not queue.sycl_device.has_aspect_fp64:
        pytest.skip(f"{queue.sycl_device.name} has no float64 arrays")
    for name in ("key", "value"):
        arguments[name] = new(*arguments[name].shape, dtype="float64")
    message = (
        "`key_cache` must have the dtype of `key`, float64, got float32; convert `key` with "
        'key.astype("float32")'
    )
    assert_refused(arguments, TypeError, message, queue)


def test_a_dtype_of_16_bytes(arguments, new, queue):
    if not queue.sycl_device.has_aspect_fp64:
        pytest.skip(f"{queue.sycl_device.name} has no complex128 arrays")
    for name in list(arguments)[:4]:
        arguments[name] = new(*arguments[name].shape, dtype="complex128")
    assert_refused(
        arguments, TypeError, "`key` must have a dtype of 1, 2, 4 or 8 bytes, got complex128", queue
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((7,), "`slot_mapping` must have at most one slot for each of the 6 tokens, got 7"),
        ((6, 1), "`slot_mapping` must have shape [num_tokens], got [6, 1]"),
        ((), "`slot_mapping` must have shape [num_tokens], got []"),
    ],
)
def test_slot_shapes(arguments, queue, shape, message):
    arguments["slot_mapping"] = to_device(np.zeros(shape, "int64"), queue)
    assert_refused(arguments, ValueError, message, queue)


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache", "slot_mapping"])
@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (np.zeros(3), "numpy.ndarray"),
        ([1, 2], "builtins.list"),
        (None, "builtins.NoneType"),
        (np.int64(3), "numpy.int64"),
    ],
    ids=["NumPy", "list", "None", "scalar"],
)
def test_not_an_array_of_the_device(arguments, queue, name, wrong, kind):
    arguments[name] = wrong
    message = (
        f"`{name}` must be a dpnp array, a usm_ndarray or a torch.Tensor, got {kind}; "
        "dpnp.asarray makes an array of the device"
    )
    assert_refused(arguments, TypeError, message, queue)


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
@pytest.mark.parametrize("kind", ["dpnp", "usm_ndarray"])
def test_read_only_caches(arguments, queue, name, kind):
    arguments[name].flags["W"] = False
    if kind == "dpnp":
        arguments[name] = arrays.as_dpnp(arguments[name])
    assert_refused(arguments, ValueError, f"`{name}` must be writable, got a read-only array", queue)


def test_read_only_rows_and_slots_are_no_obstacle(arguments):
    for name in ("key", "value", "slot_mapping"):
        arguments[name].flags["W"] = False
    reshape_and_cache(**arguments)


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_broadcast_cache(arguments, new, queue, name):
    tensor = arrays.tensor_module()
    arguments[name] = tensor.broadcast_to(new(1, 4, 2, 8), (5, 4, 2, 8))
    message = (
        f"`{name}` is written, so its elements must not share memory, got strides [0, 16, 8, 1]; "
        "copy the broadcast array first"
    )
    # dpctl makes broadcast arrays read-only, and that is said first.
    if not arguments[name].flags.writable:
        assert_refused(arguments, ValueError, f"`{name}` must be writable, got a read-only array", queue)
        memory = arguments[name].usm_data
        arguments[name] = tensor.usm_ndarray((5, 4, 2, 8), "f4", buffer=memory, strides=(0, 16, 8, 1))
    assert_refused(arguments, ValueError, message, queue)


def test_two_blocks_in_one_memory(arguments, new, queue):
    """The least that a broadcast can repeat."""
    tensor, memory = arrays.tensor_module(), new(4, 2, 8).usm_data
    for name in ("key_cache", "value_cache"):
        arguments[name] = new(2, 4, 2, 8)
    arguments["key_cache"] = tensor.usm_ndarray((2, 4, 2, 8), "f4", buffer=memory, strides=(0, 16, 8, 1))
    message = (
        "`key_cache` is written, so its elements must not share memory, got strides [0, 16, 8, 1]; "
        "copy the broadcast array first"
    )
    assert_refused(arguments, ValueError, message, queue)


def test_one_cache_for_both(arguments, queue):
    arguments["value_cache"] = arguments["key_cache"]
    assert_refused(arguments, ValueError, "`value_cache` must not be the memory of `key_cache`", queue)


@pytest.mark.parametrize("name", ["value", "key_cache", "value_cache", "slot_mapping"])
def test_another_queue(arguments, queue, name):
    """dpctl #688: arrays on a second queue of the same device; the message names both arguments."""
    import dpctl

    other = dpctl.SyclQueue(queue.sycl_device)
    assert other != queue
    arguments[name] = to_device(arrays.to_numpy(arguments[name]), other)
    message = (
        f"`{name}` must be on the queue of `key` ({DEVICE}), got another one ({DEVICE}); "
        f"move it with {name}.to_device(key.sycl_queue)"
    )
    assert_refused(arguments, ValueError, message, queue)
    arguments[name] = arguments[name].to_device(queue)
    reshape_and_cache(**arguments)


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        (
            [3, 20, 21],
            IndexError,
            "`slot_mapping[1]` must be < 20 (num_blocks * block_size), got 20",
        ),
        (
            [2**40],
            IndexError,
            f"`slot_mapping[0]` must be < 20 (num_blocks * block_size), got {2**40}",
        ),
        (
            [7, -1, 3, 7],
            ValueError,
            "`slot_mapping[3]` is slot 7, which token 0 writes already",
        ),
        ([0, 0], ValueError, "`slot_mapping[1]` is slot 0, which token 0 writes already"),
    ],
)
def test_check_slots(arguments, queue, slots, error, message):
    arguments["slot_mapping"] = to_device(np.array(slots), queue)
    assert_refused(arguments, error, message, queue, check_slots=True)


def test_check_slots_lets_good_slots_pass(arguments, queue):
    """Negatives are padding however often they come; the check sees a strided mapping as it is."""
    arguments["slot_mapping"] = to_device(np.array([19, 19, -1, 19, -1, 19, 0, 19]), queue)[::2]
    reshape_and_cache(**arguments, check_slots=True)
    with pytest.raises(TypeError, match=r"^reshape_and_cache\(\) takes 5 positional arguments"):
        reshape_and_cache(*arguments.values(), True)


def test_a_wrong_argument_is_named_before_its_values_are_read(arguments, new, queue):
    arguments["slot_mapping"] = new(6)
    message = "`slot_mapping` must be int32 or int64, got float32"
    assert_refused(arguments, TypeError, message, queue, check_slots=True)


@pytest.mark.parametrize("blocks", [2**28, 2**29, 1])
def test_too_many_slots_for_strided_rows(queue, blocks):
    """2**32 slots and more: no memory is needed to see that the strided kernel could not divide them."""
    block_size = 2**32 if blocks == 1 else 16
    cache = arrays.Operand((blocks, block_size, 1, 3), (3 * block_size, 3, 3, 1), np.dtype("int8"), queue)
    rows = arrays.Operand((1, 1, 3), (3, 3, 1), np.dtype("int8"), queue)
    slots = arrays.Operand((1,), (1,), np.dtype("int64"), queue)
    message = (
        "`key_cache` must have fewer than 2**32 slots unless its rows are contiguous multiples of 16 bytes, "
        f"got {blocks} blocks of {block_size}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        OPERATIONS["reshape_and_cache"].plan(rows, rows, cache, cache, slots, False, alignment=1)
