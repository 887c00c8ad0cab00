"""layout.py: slots, blocks, strides, shapes."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_dpex import layout

SIZES = st.integers(1, 9)


@given(block=st.integers(0, 2**40), offset=st.integers(0, 15))
def test_a_slot_and_its_block_and_offset(block, offset):
    assert layout.block_and_offset(layout.slot_of(block, offset, 16), 16) == (block, offset)


@given(shape=st.tuples(SIZES, SIZES, SIZES, SIZES))
def test_contiguous_strides_are_numpys(shape):
    strides = np.empty(shape, "int8").strides
    assert layout.contiguous_strides(shape) == strides
    assert layout.uniform_slot_stride(shape, strides) == shape[2] * shape[3]


@given(shape=st.tuples(SIZES, SIZES, SIZES, SIZES), slot=st.integers(0, 80))
def test_the_slot_formula(shape, slot):
    """Element (h, d) of slot s is element (s * num_kv_heads + h) * head_size + d."""
    num_blocks, block_size, num_kv_heads, head_size = shape
    slot %= num_blocks * block_size
    cache = np.arange(np.prod(shape)).reshape(shape)
    block, offset = layout.block_and_offset(slot, block_size)
    head, element = num_kv_heads - 1, head_size - 1
    assert cache[block, offset, head, element] == (slot * num_kv_heads + head) * head_size + element


@pytest.mark.parametrize(
    ("make", "stride"),
    [
        (lambda: np.empty((5, 4, 2, 2, 8), "int8")[:, :, 0], 32),  # keys and values in turns
        (lambda: np.empty((5, 4, 2, 16), "int8")[..., :8], 32),  # packed in one row
        (lambda: np.empty((5, 2, 4, 2, 8), "int8")[:, 0], None),  # interleaved blocks
        (lambda: np.empty((1, 2, 4, 2, 8), "int8")[:, 0], 16),  # of one block only
        (lambda: np.empty((5, 2, 1, 2, 8), "int8")[:, 0], 32),  # of one slot each
        (lambda: np.empty((5, 2, 4, 8), "int8").transpose(0, 2, 1, 3), None),  # HND memory
        (lambda: np.empty((5, 4, 2, 8), "int8")[::-1], None),
        (lambda: np.empty((5, 4, 2, 8), "int8")[::-1, ::-1], -16),
        (lambda: np.empty((5, 4, 2, 8), "int8")[:, ::2], 32),
    ],
)
def test_uniform_slot_stride(make, stride):
    """The stride is given where, and only where, slot s starts s strides after slot 0."""
    cache = make()
    assert layout.uniform_slot_stride(cache.shape, cache.strides) == stride
    addresses = [
        block * cache.strides[0] + offset * cache.strides[1]
        for block in range(cache.shape[0])
        for offset in range(cache.shape[1])
    ]
    steps = set(np.diff(addresses).tolist())
    assert steps == {stride} if stride is not None else len(steps) > 1


def test_slots_of_sequence():
    """flash-attention #2711: a table of 3 blocks of 16 holds 48 tokens, not 49."""
    assert layout.slots_of_sequence([7, 0, 2], 0, 48, 16) == [
        *range(112, 128),
        *range(16),
        *range(32, 48),
    ]
    message = (
        "`block_table` holds 3 blocks of 16, so `stop` must be <= 48, got 49; "
        "append a block to the table first"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layout.slots_of_sequence([7, 0, 2], 0, 49, 16)
    assert layout.slots_of_sequence([], 0, 0, 16) == []


def test_slots_of_blocks_that_are_no_longer_kept():
    """vLLM #42273: no slot of a released block may name memory that belongs to another sequence by then."""
    assert layout.slots_of_sequence([-1, -1, 5], 2, 10, 4) == [-1] * 6 + [20, 21]


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (-1, ValueError, "`{name}` must be >= {least}, got -1"),
        (2.0, TypeError, "`{name}` must be an int, got float"),
        ("2", TypeError, "`{name}` must be an int, got str"),
        (None, TypeError, "`{name}` must be an int, got NoneType"),
        (True, TypeError, "`{name}` must be an int, got bool"),
    ],
)
def test_cache_shape_refuses(position, wrong, error, message):
    name = ["num_blocks", "block_size", "num_kv_heads", "head_size"][position]
    sizes = [4, 16, 2, 8]
    sizes[position] = wrong
    message = message.format(name=name, least=0 if position == 0 else 1)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        layout.cache_shapes(*sizes)


def test_cache_shape_takes_whole_numbers_of_any_kind():
    shape, _ = layout.cache_shapes(np.int64(0), np.uint8(16), 2, 8)
    assert shape == (0, 16, 2, 8)
    assert {type(size) for size in shape} == {int}
    with pytest.raises(ValueError, match=r"^`head_size` must be >= 1, got 0$"):
        layout.cache_shapes(4, 16, 2, 0)


def test_slots_of_int32_rows_do_not_wrap():
    """Engines hold tables of int32, and a slot may need more bits than its block."""
    row = np.array([268435456, 134217728], "int32")
    slots = layout.slots_of_sequence(row, 15, 17, 16)
    assert slots == [2**32 + 15, 2**31]
    assert {type(slot) for slot in slots} == {int}


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (-2, -1)])
def test_positions_before_the_sequence_are_refused(start, stop):
    message = f"`start` and `stop` must be positions 0 <= start <= stop, got {start} and {stop}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layout.slots_of_sequence([7, 2], start, stop, 16)


@pytest.mark.parametrize("size", [0, -1])
def test_a_value_head_size_is_named(size):
    with pytest.raises(ValueError, match=f"^`value_head_size` must be >= 1, got {size}$"):
        layout.cache_shapes(4, 16, 2, 8, size)
