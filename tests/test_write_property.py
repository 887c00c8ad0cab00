"""reshape_and_cache over shapes, layouts, dtypes and slots that nobody thought of."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import check_write, random_bits, sentinel

DTYPES = ["int8", "float16", "uint16", "int32", "float32", "int64", "complex64"]
STEPS = [1, 1, 1, 2, -1, -3]


@st.composite
def view(draw, make, shape, dtype):
    """An array of this shape: its axes in any order in memory, each with a step and a gap, at any offset."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from(STEPS)) for _ in shape]
    gaps = [draw(st.sampled_from([0, 0, 1, 3])) for _ in shape]
    if draw(st.booleans()):  # the usual case would else be rare
        order, steps, gaps = range(len(shape)), [1] * len(shape), [0] * len(shape)
    room = [size * abs(step) + gap for size, step, gap in zip(shape, steps, gaps)]
    offset = draw(st.sampled_from([0, 0, 1, 2, 5]))
    memory = make(offset + int(np.prod(room)), dtype)[offset:]
    array = memory.reshape([room[axis] for axis in order]).transpose(np.argsort(order))
    used = [slice(size * abs(step)) for size, step in zip(shape, steps)]
    return array[tuple(used)][tuple(slice(None, None, step) for step in steps)]


@st.composite
def writes(draw):
    """Arguments of a write, on NumPy arrays."""
    dtype = draw(st.sampled_from(DTYPES))
    tokens, blocks = draw(st.integers(0, 7)), draw(st.integers(0, 4))
    block_size, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    sizes = [draw(st.sampled_from([1, 2, 3, 4, 8, 16, 17]))] * 2
    if draw(st.booleans()):
        sizes[1] = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def bits(count, dtype):
        return random_bits(rng, count, dtype)

    rows = [draw(view(bits, (tokens, heads, size), dtype)) for size in sizes]
    shape = blocks, block_size, heads
    if sizes[0] == sizes[1] and draw(st.booleans()):
        both = draw(view(sentinel, (2, *shape, sizes[0]), dtype))
        caches = [both[0], both[1]]
    else:
        caches = [draw(view(sentinel, (*shape, size), dtype)) for size in sizes]
    capacity = blocks * block_size
    inside = st.integers(0, max(capacity - 1, 0))
    outside = st.sampled_from([-1, -2, -capacity, -(2**31), capacity, capacity + 1, 2**31 - 1])
    given_slots = draw(st.lists(inside, max_size=tokens, unique=True))
    given_slots = [draw(outside) if draw(st.integers(0, 4)) == 0 else slot for slot in given_slots]
    slot_dtype = draw(st.sampled_from(["int32", "int64"]))
    slots = draw(view(np.zeros, (len(given_slots),), slot_dtype))
    slots[...] = given_slots
    return (*rows, *caches, slots)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=writes())
def test_any_write(whole_rows, queue, arguments):
    check_write(queue, *arguments)
