"""What every operation shares: how calls are bound, prepared once, and prepared again where they differ."""

import inspect

import numpy as np
import pytest

import kvcache_dpex as kv
from helpers import check_write, random_bits, sentinel, to_bytes, to_device
from kvcache_dpex import reference
from kvcache_dpex.ops import calls
from kvcache_dpex.ops.operation import OPERATIONS, using

RETURNING = ["dequant_cache", "paged_attention", "merge_attention_states"]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def plans():
    """The plans of operations, which run as usual."""
    seen = []

    def launch(plan):
        seen.append(plan)
        return calls.launch_of(plan)

    with using(launch=launch):
        yield seen


def write_case(queue, rng, dtype="float32"):
    rows = random_bits(rng, (2, 3, 2, 16), dtype)
    host = [*rows, *(sentinel((5, 4, 2, 16), dtype) for _ in range(2)), np.array([7, -1, 0])]
    return host, [to_device(array, queue) for array in host]


def assert_written(host, device):
    reference.reshape_and_cache(*host)
    for mine, other in zip(host, device):
        np.testing.assert_array_equal(to_bytes(mine), to_bytes(other))


def test_operations_are_those_of_the_package():
    from kvcache_dpex.ops import attention, dequantize, merge, moves, quantize, rotary, slots, write  # noqa: F401

    others = {"BlockPool", "OutOfBlocks", "PagedCache", "empty_cache", "empty_quant_cache"}
    others |= {"copy_blocks", "gather_blocks", "swap_blocks", "zero_blocks"}
    others |= {"append_paged_kv_cache", "concat_and_cache_mla", "dequant_caches"}
    others |= {"KernelError", "launch_kernel", "simulate"}
    assert set(OPERATIONS) == set(kv.__all__) - others
    for name, operation in OPERATIONS.items():
        assert getattr(kv, name).operation is operation
        assert inspect.signature(getattr(kv, name)) == operation.signature
        assert hasattr(reference, name)


def test_arguments_by_position_and_by_name(queue, rng):
    for by_name in (0, 2, 5):
        host, device = write_case(queue, rng)
        names = [array.name for array in OPERATIONS["reshape_and_cache"].arrays]
        split = len(names) - by_name
        kv.reshape_and_cache(*device[:split], **dict(zip(names[split:], device[split:])))
        assert_written(host, device)


@pytest.mark.parametrize("dtype", [[], {}, np.zeros(2)], ids=["list", "dict", "array"])
def test_options_that_are_no_dtype(queue, dtype):
    kq, _, ks, _ = kv.empty_quant_cache(2, 4, 1, 8, device=queue)
    with pytest.raises(TypeError, match=r"^`dtype` must be "):
        kv.dequant_cache(kq, ks, dtype=dtype)


@pytest.mark.parametrize("name", ["reshape_and_cache", "reshape_and_cache_quant", *RETURNING])
def test_options_that_nothing_can_be_remembered_by(queue, name):
    """A list names itself in the error, whichever option it is passed for."""
    operation = getattr(kv, name).operation
    array = to_device(np.zeros(4, "f4"), queue)
    for option in operation.options:
        options = tuple([] if each is option else each.default for each in operation.options)
        with pytest.raises(TypeError, match=rf"^`{option.name}` must be of type {option.kind}, got \[\]$"):
            operation.run((array,) * len(operation.arrays), options)


def test_calls_of_one_kind_are_planned_once(queue, rng, plans):
    """numba-dpex #1070: other arrays, slots and values cost no second look."""
    for _ in range(20):
        host, device = write_case(queue, rng)
        kv.reshape_and_cache(*device)
        assert_written(host, device)
    assert len(plans) == 1


def test_every_kind_of_call_is_planned_anew(queue, rng, plans):
    """Whatever the plan depends on is part of the kind: dtype, shape, strides, alignment, options."""
    expected = 0
    for dtype in ("float32", "int32", "float16"):
        host, device = write_case(queue, rng, dtype)
        kv.reshape_and_cache(*device)
        assert_written(host, device)
        expected += 1
    for tokens in (slice(1, 3), slice(0, 3, 2)):
        host, device = write_case(queue, rng)
        for arrays in (host, device):
            arrays[0], arrays[1], arrays[4] = arrays[0][tokens], arrays[1][tokens], arrays[4][:2]
        kv.reshape_and_cache(*device)
        assert_written(host, device)
        expected += 1
    assert len(plans) == expected


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_alignment_is_part_of_the_kind(queue, rng, plans, offset):
    """A wide access of a misaligned address faults on a GPU; the same metadata must not share its kernel."""
    for moved in (0, offset, 16, offset):
        base = random_bits(rng, (512,), "int8")
        key, value = (base[moved + at : moved + at + 96].reshape(3, 2, 16) for at in (0, 128))
        caches = [sentinel((5, 4, 2, 16), "int8") for _ in range(2)]
        check_write(queue, key, value, *caches, np.array([7, -1, 0]))
    assert len(plans) == 2
    if offset < 8:  # the words of a CPU's kernel have eight bytes
        assert plans[0].kernel is not plans[1].kernel


def test_results_of_several_dtypes_in_turn(queue, rng):
    """The kind of call includes the options: one geometry, three results."""
    q = random_bits(rng, (3, 4, 2, 16), "int8")
    scales = rng.standard_normal((12, 2)).astype("f4")
    device = to_device(q, queue), to_device(scales, queue)
    for dtype in ("float32", "float16", None, "bfloat16", "float32"):
        found = kv.dequant_cache(*device, **({} if dtype is None else {"dtype": dtype}))
        wanted = reference.dequant_cache(q, scales, dtype=dtype or "float32")
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(to_bytes(found), to_bytes(wanted))


@pytest.mark.parametrize("gap", range(1, 8))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_blocks_of_codes_that_are_some_bytes_apart(queue, rng, gap, dtype):
    """Whole blocks at odd addresses: no kernel may round their distance to a whole word."""
    size = 4 * 2 * 16
    memory = random_bits(rng, (5 * (size + gap),), "int8")
    q = np.lib.stride_tricks.as_strided(memory, (5, 4, 2, 16), (size + gap, 32, 16, 1))
    scales = rng.standard_normal((20, 2)).astype("f4")
    usm = to_device(memory, queue)
    usm = usm.get_array() if hasattr(usm, "get_array") else usm
    codes = type(usm)((5, 4, 2, 16), "i1", buffer=usm, strides=(size + gap, 32, 16, 1))
    found = kv.dequant_cache(codes, to_device(scales, queue), dtype=dtype)
    wanted = reference.dequant_cache(q, scales, dtype=dtype)
    np.testing.assert_array_equal(to_bytes(found), to_bytes(wanted))


def test_addresses_are_remembered_up_to_a_limit(queue, rng, monkeypatch):
    monkeypatch.setattr(calls.Kind, "MOST", 3)
    with using():
        for _ in range(8):
            host, device = write_case(queue, rng)
            kv.reshape_and_cache(*device)
            assert_written(host, device)
        (kind,) = OPERATIONS["reshape_and_cache"].prepared.values()
        assert 1 <= len(kind) <= 3


def test_settings_end_with_their_block(queue, rng):
    operation = OPERATIONS["reshape_and_cache"]
    kv.reshape_and_cache(*write_case(queue, rng)[1])
    before, prepared = calls.settings, operation.prepared
    with using(launch=None):
        assert operation.prepared == {}
        assert calls.settings.launch is None
    assert calls.settings is before
    assert operation.prepared is prepared
    with using():
        kv.reshape_and_cache(*write_case(queue, rng)[1])
        assert operation.prepared is not prepared
    assert operation.prepared is prepared
