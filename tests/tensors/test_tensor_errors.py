"""What is refused, and what autograd is told."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tensor_cases import contiguous_case, memory  # noqa: E402

import kvcache_dpex  # noqa: E402
from helpers import SENTINEL  # noqa: E402
from kvcache_dpex import torch as kv  # noqa: E402
from kvcache_dpex.runtime.environment import devices  # noqa: E402
from kvcache_dpex.runtime.launch import tensors  # noqa: E402

NAMES = ("key", "value", "key_cache", "value_cache", "slot_mapping")


def arguments(**replaced):
    found = dict(zip(NAMES, (*contiguous_case(), torch.tensor([7, -1, 19, 0, 20, 3]))))
    return {**found, **{name: change(found[name]) for name, change in replaced.items()}}


def negated_view(tensor):
    negated = torch.zeros(*tensor.shape, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    return negated


def resized(tensor, size):
    """The tensor over a storage of so many bytes, as sleep modes and sharding leave it."""
    tensor.untyped_storage().resize_(size)
    return tensor


def fake(tensor):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


REFUSED = {
    "numpy key": ("key", lambda t: t.numpy(), TypeError, "`key` must be a torch.Tensor, got numpy.ndarray"),
    "numpy cache": (
        "key_cache",
        lambda t: t.numpy(),
        TypeError,
        r"`key_cache` .*torch.as_tensor\(key_cache\)",
    ),
    "list of slots": (
        "slot_mapping",
        lambda t: t.tolist(),
        TypeError,
        "`slot_mapping` must be a torch.Tensor",
    ),
    "dpnp cache": (
        "value_cache",
        lambda t: kvcache_dpex.empty_cache(5, 4, 2, 16, device="cpu")[0],
        TypeError,
        r"`value_cache` must be a torch.Tensor, got dpnp.*to_torch\(value_cache\) shares its memory",
    ),
    "meta": (
        "value",
        lambda t: t.to("meta"),
        ValueError,
        "`value` must be on the device of `key`, cpu, got meta",
    ),
    "sparse": ("value", lambda t: t.to_sparse(), TypeError, "`value` must be dense, got torch.sparse_coo"),
    "sparse cache": ("key_cache", lambda t: t.to_sparse(), TypeError, "`key_cache` must be dense"),
    "fake value": ("value", fake, AssertionError, "Please convert all Tensors to FakeTensors first"),
    "freed": (
        "key",
        lambda t: resized(t, 0),
        TypeError,
        "`key` must lie in .* 768 bytes of .* 0",
    ),
    "freed cache": (
        "value_cache",
        lambda t: resized(t, 0),
        TypeError,
        "`value_cache` must lie in its storage",
    ),
    "freed slots": (
        "slot_mapping",
        lambda t: resized(t, 0),
        TypeError,
        "`slot_mapping` must lie in its stor",
    ),
    "freed view": (
        "value",
        lambda t: resized(torch.cat([t, t])[6:], 0),
        TypeError,
        "`value` must lie in its storage, got a tensor that needs 1536 bytes of a storage of 0",
    ),
    "short storage of a view": (
        "value",
        lambda t: resized(torch.cat([t, t])[6:], 1535),
        TypeError,
        "`value` must lie in its storage, got a tensor that needs 1536 bytes of a storage of 1535",
    ),
    "short storage": (
        "key_cache",
        lambda t: resized(t, 2559),
        TypeError,
        "`key_cache` must lie in its storage, got a tensor that needs 2560 bytes of a storage of 2559, which",
    ),
    "short strided": (
        "key",
        lambda t: resized(torch.zeros(6, 2, 32)[:, :, ::2], 1500),
        TypeError,
        "`key` must lie in its storage, got a tensor that needs 1532 bytes of a storage of 1500, which",
    ),
    "rank": ("key", lambda t: t[0], ValueError, r"`key` must have shape \[num_tokens, .*got \[2, 16\]"),
    "dtype": ("value", lambda t: t.double(), TypeError, "`value` must have the dtype of `key`, float32, got"),
    "cache dtype": ("key_cache", lambda t: t.half(), TypeError, "`key_cache` must have the dtype .*float16"),
    "slots dtype": ("slot_mapping", lambda t: t.float(), TypeError, "must be int32 or int64, got float32"),
    "slots rank": ("slot_mapping", lambda t: t[None], ValueError, "`slot_mapping` must have shape"),
    "more slots": ("slot_mapping", lambda t: t.repeat(2), ValueError, "at most one slot for each of the 6"),
    "heads": ("key_cache", lambda t: t[:, :, :1], ValueError, "`key_cache` holds rows of 1 heads of 16"),
    "slots of value": ("value_cache", lambda t: t[:4], ValueError, "`value_cache` must have the 5 blocks"),
    "shared elements": (
        "key_cache",
        lambda t: t[:1].expand(5, 4, 2, 16),
        ValueError,
        "`key_cache` is written, so its elements must not share memory",
    ),
    "none": ("value", lambda t: None, TypeError, "`value` must be .* got builtins.NoneType"),
}


def test_remedies_of_dtypes():
    given = arguments(key=lambda t: t.double(), value=lambda t: t.double())
    with pytest.raises(TypeError, match=r"; convert `key` with key\.to\(torch\.float32\)$"):
        kv.reshape_and_cache(*given.values())
    given = arguments(key=lambda t: t.bfloat16(), value=lambda t: t.bfloat16())
    given["key_cache"] = given["key_cache"].bfloat16().view(torch.uint16)
    remedy = r"; if it holds the bits of bfloat16, pass key_cache\.view\(torch\.bfloat16\)$"
    with pytest.raises(TypeError, match=remedy):
        kv.reshape_and_cache(*given.values())


def test_the_arguments_of_vllm():
    one = torch.tensor(1.0)
    message = (
        "reshape_and_cache() takes 5 positional arguments but 8 were given; vLLM's 8 arguments are those of "
        "reshape_and_cache_flash"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        kv.reshape_and_cache(*arguments().values(), "auto", one, one)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    name, change, error, message = REFUSED[case]
    given = arguments(**{name: change})
    untouched = {name: memory(given[name]) for name in NAMES if _has_memory(given[name])}
    with pytest.raises(error, match=message):
        kv.reshape_and_cache(*given.values())
    assert all(torch.equal(memory(given[name]), bytes) for name, bytes in untouched.items())


@pytest.mark.parametrize(("name", "tensor"), [("value_cache", "key"), ("key", "value")])
def test_arrays_among_tensors(name, tensor):
    """The package's own function takes either kind; the message says which argument is of which."""
    given = arguments()
    caches = kvcache_dpex.empty_cache(5, 4, 2, 16, device="cpu")
    given[name] = caches[1] if name == "value_cache" else caches[0].reshape(20, 2, 16)[:6]
    message = (
        f"`{tensor}` is a torch.Tensor but `{name}` is an array of dpnp; all must be of one kind: "
        f"kvcache_dpex.torch.to_torch({name}) shares its memory with torch"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        kvcache_dpex.reshape_and_cache(*given.values())


def _has_memory(thing):
    if type(thing) is not torch.Tensor or thing.device.type != "cpu" or thing.layout is not torch.strided:
        return False
    return not thing._is_zerotensor() and thing.untyped_storage().nbytes() >= thing.nbytes


def test_a_tensor_that_ends_with_its_storage_is_taken():
    """Views at an offset, with strides, of no element, and over a storage that has just enough bytes."""
    given = arguments()
    key = given["key"]
    views = torch.cat([key, key])[6:], torch.stack([key, key], -1)[..., 1]
    for view in (*views, resized(key.clone(), key.nbytes)):
        kvcache_dpex.reshape_and_cache(view, view, *list(given.values())[2:])
        assert torch.equal(given["key_cache"][1, 3], key[0])
    empty = resized(key[:0].clone(), 0)
    kvcache_dpex.reshape_and_cache(
        empty, empty, *list(given.values())[2:4], torch.zeros(0, dtype=torch.int64)
    )


def test_inside_functionalize_there_is_no_memory():
    """functorch #635: a functional tensor's pointer is 0 and its offset."""
    given = arguments()

    def write(key, value, key_cache, value_cache, slot_mapping):
        kvcache_dpex.reshape_and_cache(key[1:], value[1:], key_cache, value_cache, slot_mapping[1:])
        return key

    with pytest.raises(TypeError, match="`key` must have memory, got a tensor inside"):
        torch.func.functionalize(write)(*given.values())


def test_one_memory_for_both_caches_is_refused():
    given = arguments()
    given["value_cache"] = given["key_cache"]
    with pytest.raises(ValueError, match="`value_cache` must not be the memory of `key_cache`"):
        kv.reshape_and_cache(*given.values())


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache"])
def test_gradients_are_refused_in_grad_mode_only(name):
    given = arguments(**{name: lambda t: t.clone().requires_grad_()})
    for run in (kv.reshape_and_cache, torch.ops.kvcache_dpex.reshape_and_cache):
        with pytest.raises(ValueError, match=rf"`{name}` must not require a gradient.*{name}.detach\(\)"):
            run(*given.values())
    with torch.no_grad():
        kv.reshape_and_cache(*given.values())
    assert torch.equal(given["key_cache"][1, 3], given["key"][0])


def test_int8_gradients_are_refused_in_grad_mode_only():
    key = torch.ones(1, 2, 16, requires_grad=True)
    caches = kv.empty_quant_cache(2, 2, 2, 16, device="cpu")
    slots = torch.tensor([0])
    with pytest.raises(ValueError, match="`key` must not require a gradient"):
        kv.reshape_and_cache_quant(key, key, *caches, slots)
    with torch.no_grad():
        kv.reshape_and_cache_quant(key, key, *caches, slots)
    caches[2].requires_grad_()
    with pytest.raises(ValueError, match="`scales` must not require a gradient"):
        kv.dequant_cache(caches[0], caches[2])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=["no_grad", "grad"])
def test_autograd_notices_a_write_to_a_cache_that_it_saved(mode):
    given = arguments()
    weight = torch.ones(16, requires_grad=True)
    read = (given["key_cache"] * weight).sum()
    with mode():
        kv.reshape_and_cache(*given.values())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        read.backward()


def test_inference_mode():
    """As torch's own in-place operations: what inference mode made is written in inference mode only."""
    with torch.inference_mode():
        made_inside = arguments()
        kv.reshape_and_cache(*made_inside.values())
        assert torch.equal(made_inside["key_cache"][1, 3], made_inside["key"][0])
    with pytest.raises(
        RuntimeError, match="`key_cache` was made in inference mode, so it can only be written"
    ):
        kv.reshape_and_cache(*made_inside.values())


LAZY = {
    "negated": negated_view,
    "conjugated": lambda tensor: tensor.to(torch.complex64).conj(),
    "all zero": lambda tensor: torch._efficientzerotensor(tensor.shape),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("name", ["key", "key_cache"])
def test_tensors_whose_memory_does_not_hold_their_values_are_refused(name, kind):
    """torch's conjugate and negative bits are lazy, and a zero tensor has no memory at all."""
    given = arguments(**{name: LAZY[kind]})
    with pytest.raises(TypeError, match=rf"`{name}` must hold its own values.*{name}.resolve_conj\(\)"):
        kv.reshape_and_cache(*given.values())
    assert not (memory(given["value_cache"]) != SENTINEL).any()


def test_int8_write_refuses_what_has_no_int8_form():
    caches = kv.empty_quant_cache(2, 2, 2, 16, device="cpu")
    rows = torch.zeros(1, 2, 16, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"`key` must be float32, float16, or bfloat16 .*got float64"):
        kv.reshape_and_cache_quant(rows, rows, *caches, torch.tensor([0]))


def test_quantize_refuses_codes_of_two_formats():
    """Each would do alone: one kernel writes both."""
    kq, vq, ks, vs = kv.empty_quant_cache(2, 2, 2, 16, device="cpu")
    rows = torch.ones(1, 2, 16)
    with pytest.raises(TypeError, match=r"^`vq` must have the dtype of `kq`, int8, got float8_e4m3fn$"):
        kv.reshape_and_cache_quant(rows, rows, kq, vq.view(torch.float8_e4m3fn), ks, vs, torch.tensor([0]))
    assert not vs.any()


def test_dequantize_refuses_another_dtype_than_that_of_out():
    kq, _, ks, _ = kv.empty_quant_cache(2, 2, 2, 16, device="cpu")
    with pytest.raises(TypeError, match=r"`out` must be float32.* got float32 with dtype=torch.float16"):
        kv.dequant_cache(kq, ks, dtype=torch.float16, out=torch.zeros(kq.shape))
    with pytest.raises(TypeError, match=r"`dtype` must be a torch.dtype or its name, got 'half a float'"):
        kv.dequant_cache(kq, ks, dtype="half a float")


def test_flash_refuses_other_kinds_of_cache():
    scale, message = torch.ones(1), r"`kv_cache_dtype` must be one of 'auto', .*, 'fp8_e5m2', got 'nvfp4'"
    with pytest.raises(ValueError, match=message):
        kv.reshape_and_cache_flash(*arguments().values(), "nvfp4", scale, scale)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.float16),
        ("float", torch.float32),
        ("float32", torch.float32),
        ("half", torch.float16),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
    ],
)
def test_flash_knows_vllms_names_of_dtypes(name, dtype):
    """Each copies into a cache of its own dtype, and refuses one of another."""
    key, value, *caches, slots = arguments().values()
    given = key.to(dtype), value.to(dtype), *(cache.to(dtype).zero_() for cache in caches), slots
    kv.reshape_and_cache_flash(*given, name, torch.ones(1), torch.ones(1))
    assert torch.equal(given[2][1, 3], given[0][0])
    if name != "auto":
        caches[0] = caches[0].double()
        with pytest.raises(ValueError, match=f"`kv_cache_dtype` must be the dtype of .* got '{name}'"):
            kv.reshape_and_cache_flash(key, value, *caches, slots, name, torch.ones(1), torch.ones(1))


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((4, 0, 2, 16), ValueError, "`block_size` must be >= 1, got 0"),
        ((-1, 4, 2, 16), ValueError, "`num_blocks` must be >= 0, got -1"),
        ((4, 4.0, 2, 16), TypeError, "`block_size` must be an int, got float"),
    ],
)
def test_allocation_refuses_sizes(sizes, error, message):
    for allocate in (kv.empty_cache, kv.empty_quant_cache):
        with pytest.raises(error, match=message):
            allocate(*sizes, device="cpu")


def test_allocation_takes_names_and_numpy_integers():
    key_cache, value_cache = kv.empty_cache(
        *np.array([4, 8, 2, 16]), value_head_size=8, dtype="bfloat16", device="cpu"
    )
    assert key_cache.dtype == value_cache.dtype == torch.bfloat16
    assert (key_cache.shape, value_cache.shape) == ((4, 8, 2, 16), (4, 8, 2, 8))
    assert not key_cache.any()
    with pytest.raises(TypeError, match=r"`dtype` must be a torch.dtype or its name, got 'quick'"):
        kv.empty_cache(4, 8, 2, 16, dtype="quick", device="cpu")


def test_allocation_of_values_with_a_head_size_of_their_own():
    kq, vq, ks, vs = kv.empty_quant_cache(4, 8, 2, 16, value_head_size=24, device="cpu")
    assert (kq.shape, vq.shape) == ((4, 8, 2, 16), (4, 8, 2, 24))
    assert ks.shape == vs.shape == (32, 2)
    with pytest.raises(ValueError, match="`value_head_size` must be >= 1, got 0"):
        kv.empty_cache(4, 8, 2, 16, value_head_size=0, device="cpu")


class Device:
    is_cpu = True
    name = "a CPU"
    has_aspect_usm_system_allocations = False


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "tensors on the CPU need SYCL's CPU device, and none was found: pip install intel-opencl-rt"),
        ([Device], r"a CPU does not reach ordinary memory \(aspect usm_system_allocations\)"),
    ],
    ids=["no CPU device", "no system allocations"],
)
def test_tensors_on_the_cpu_need_a_device_that_reaches_them(found, message, monkeypatch):
    monkeypatch.setattr(tensors, "_cpu_queue", None)
    monkeypatch.setattr(devices, "load_dpctl", lambda: SimpleNamespace(get_devices=lambda: found))
    monkeypatch.setattr(devices, "queue_for", lambda name: SimpleNamespace(sycl_device=Device))
    with pytest.raises(RuntimeError, match=message):
        kv.reshape_and_cache(*arguments().values())


def test_the_default_device_is_the_cpu_where_torch_has_no_xpu(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert kv.empty_cache(4, 8, 2, 16)[0].device.type == "cpu"
