"""reshape_and_cache on torch tensors, against the oracle, whole memories byte by byte."""

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from tensor_cases import (  # noqa: E402
    SLOTS,
    as_bits,
    check_write,
    contiguous_case,
    memory,
    random_bits,
    sentinel,
)

import kvcache_dpex  # noqa: E402
from kvcache_dpex import reference  # noqa: E402
from kvcache_dpex import torch as kv  # noqa: E402

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.float64,
    torch.int64,
    torch.complex64,
]


def slot_tensor(slots=SLOTS, dtype=torch.int64):
    return torch.tensor(slots, dtype=dtype)


def test_usage_block_of_kv_cache_xpu_equals_the_oracle():
    torch.manual_seed(0)
    key, value = torch.randn(2, 8, 8, 128)
    slot_mapping = torch.tensor([16, 4095, -1, 0, 77, 78, 4096, 2000])
    key_cache, value_cache = kv.empty_cache(
        num_blocks=256, block_size=16, num_kv_heads=8, head_size=128, device="cpu"
    )
    kv.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)

    kq, vq, ks, vs = kv.empty_quant_cache(
        num_blocks=256, block_size=16, num_kv_heads=8, head_size=128, device="cpu"
    )
    kv.reshape_and_cache_quant(key, value, kq, vq, ks, vs, slot_mapping)
    approx = kv.dequant_cache(kq, ks)

    rows = key.numpy(), value.numpy()
    caches = reference.empty_cache(256, 16, 8, 128)
    reference.reshape_and_cache(*rows, *caches, slot_mapping.numpy())
    codes = reference.empty_quant_cache(256, 16, 8, 128)
    reference.reshape_and_cache_quant(*rows, *codes, slot_mapping.numpy())
    for found, expected in zip((key_cache, value_cache, kq, vq, ks, vs), (*caches, *codes)):
        np.testing.assert_array_equal(found.numpy(), expected)
    np.testing.assert_array_equal(approx.numpy(), reference.dequant_cache(codes[0], codes[2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 3])
def test_every_dtype_is_copied_bit_for_bit(dtype, size):
    check_write(*contiguous_case(dtype, size=size), slot_tensor())


def fused_qkv(dtype):
    qkv = random_bits((6, 4 + 2 + 2, 16), dtype)
    return qkv[:, 4:6], qkv[:, 6:], *contiguous_case(dtype)[2:]


def interleaved_blocks(dtype):
    both = sentinel((5, 2, 4, 2, 16), dtype)
    return *contiguous_case(dtype)[:2], both[:, 0], both[:, 1]


def packed_in_one_row(dtype):
    both = sentinel((5, 4, 2, 32), dtype)
    return *contiguous_case(dtype)[:2], both[..., :16], both[..., 16:]


def heads_first(dtype):
    caches = sentinel((2, 5, 2, 4, 16), dtype).transpose(2, 3)
    return *contiguous_case(dtype)[:2], caches[0], caches[1]


def broadcast_rows(dtype):
    key, value, *caches = contiguous_case(dtype)
    return key[:1].expand(6, 2, 16), value[:, :1].expand(6, 2, 16), *caches


def misaligned(dtype):
    def shifted(shape):
        return sentinel((int(np.prod(shape)) + 1,), dtype)[1:].view(shape)

    key, value, *_ = contiguous_case(dtype)
    return key, value, shifted((5, 4, 2, 16)), shifted((5, 4, 2, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    "layout",
    [fused_qkv, interleaved_blocks, packed_in_one_row, heads_first, broadcast_rows, misaligned],
    ids=lambda layout: layout.__name__,
)
def test_strides_decide(layout, dtype):
    check_write(*layout(dtype), slot_tensor())


@pytest.mark.parametrize(
    "slots",
    [
        slot_tensor(dtype=torch.int32),
        torch.tensor([[slot, 1000] for slot in SLOTS])[:, 0],
        slot_tensor(SLOTS[:2]),
        slot_tensor([-1, -2, -(2**40), 20, 2**40, -1]),
        slot_tensor([]),
    ],
    ids=["int32", "strided", "fewer than rows", "none to write", "empty"],
)
def test_slots(slots):
    check_write(*contiguous_case(), slots)


@pytest.mark.parametrize(
    "sizes",
    [{"tokens": 0}, {"blocks": 0}, {"heads": 0}],
    ids=lambda sizes: next(iter(sizes)),
)
def test_zero_sizes_write_nothing(sizes):
    case = contiguous_case(**sizes)
    check_write(*case, slot_tensor(SLOTS[: case[0].shape[0]]))


def test_value_may_have_a_head_size_of_its_own():
    key, _, key_cache, _ = contiguous_case()
    value, value_cache = random_bits((6, 2, 5), torch.float32), sentinel((5, 4, 2, 5), torch.float32)
    check_write(key, value, key_cache, value_cache, slot_tensor())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_shape_dtype_and_offset(data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    tokens, heads, block_size = draw(st.integers(0, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    blocks, size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 7, 8, 16, 33]))
    shape, rows = (blocks, block_size, heads, size), (tokens, heads, size)

    def placed(fill, shape):
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        wide = (*shape[:-1], before + shape[-1] + after)
        return fill(wide, dtype)[..., before : before + shape[-1]]

    count = blocks * block_size
    slots = draw(st.permutations(range(count)))[:tokens] + [-1] * (tokens - count)
    slots = [draw(st.sampled_from([slot, slot, slot, -3, count + 2])) for slot in slots]
    check_write(
        placed(random_bits, rows),
        placed(random_bits, rows),
        placed(sentinel, shape),
        placed(sentinel, shape),
        torch.tensor(slots, dtype=draw(st.sampled_from([torch.int32, torch.int64]))),
    )


def test_the_package_itself_takes_tensors():
    check_write(*contiguous_case(torch.bfloat16), slot_tensor(), run=kvcache_dpex.reshape_and_cache)


def test_parameters_and_buffers_are_tensors():
    key, value, key_cache, value_cache = contiguous_case()
    caches = [torch.nn.Parameter(cache, requires_grad=False) for cache in (key_cache, value_cache)]
    check_write(torch.nn.Parameter(key, requires_grad=False), value, *caches, slot_tensor())


def test_temporaries_live_until_their_rows_are_written():
    caches = kv.empty_cache(500, 1, 2, 16, device="cpu")
    for slot in range(500):
        rows = torch.full((1, 2, 16), float(slot))
        kv.reshape_and_cache(rows, -rows, *caches, torch.tensor([slot]))
        del rows
        if slot % 100 == 0:
            gc.collect()
    expected = torch.arange(500.0).view(500, 1, 1, 1).expand(500, 1, 2, 16)
    assert torch.equal(caches[0], expected)
    assert torch.equal(caches[1], -expected)


def test_threads_write_at_the_same_time():
    key_cache, value_cache = kv.empty_cache(4, 64, 2, 16, device="cpu")

    def write(block):
        for offset in range(64):
            rows = torch.full((1, 2, 16), float(64 * block + offset))
            kv.reshape_and_cache(rows, -rows, key_cache, value_cache, torch.tensor([64 * block + offset]))

    threads = [threading.Thread(target=write, args=(block,)) for block in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.arange(256.0).view(4, 64, 1, 1).expand(4, 64, 2, 16)
    assert torch.equal(key_cache, expected)
    assert torch.equal(value_cache, -expected)


def test_a_read_only_array_is_written_because_torch_does_not_know():
    read_only = np.zeros((5, 4, 2, 16), "f4")
    read_only.flags.writeable = False
    with pytest.warns(UserWarning, match="not writable"):
        key_cache = torch.from_numpy(read_only)
    key, value, _, value_cache = contiguous_case()
    kv.reshape_and_cache(key, value, key_cache, value_cache, slot_tensor())
    np.testing.assert_array_equal(as_bits(key_cache)[1, 3], as_bits(key)[0])


def test_check_slots_names_the_slot_and_writes_nothing():
    case = contiguous_case()
    before = [memory(tensor) for tensor in case]
    with pytest.raises(IndexError, match=r"`slot_mapping\[4\]` must be < 20"):
        kv.reshape_and_cache(*case, slot_tensor(), check_slots=True)
    with pytest.raises(ValueError, match=r"`slot_mapping\[1\]` is slot 3, which token 0 writes already"):
        kv.reshape_and_cache(*case, slot_tensor([3, 3]), check_slots=True)
    assert all(torch.equal(memory(tensor), bytes) for tensor, bytes in zip(case, before))


def test_what_is_known_of_shapes_stays_bounded():
    """A prompt of every length has a shape of its own."""
    from kvcache_dpex.runtime.launch import tensors

    memory = torch.zeros(5000)
    for size in range(1, 5000):
        tensors.read(memory[:size])
    assert 0 < len(tensors._extents) <= 4096
