"""Index spaces, and which kernel and word a write takes."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import Twins, random_bits, sentinel, skip_record_on_gpu
from kvcache_dpex import reshape_and_cache
from kvcache_dpex.ops import groups
from kvcache_dpex.ops.calls import launch_of
from kvcache_dpex.ops.operation import using


@given(
    fast=st.integers(1, 20000),
    slow=st.integers(1, 70000),
    limit=st.sampled_from([1, 8, 64, 256, 500, 512, 1024, 8192]),
    is_cpu=st.booleans(),
)
def test_row_groups(fast, slow, limit, is_cpu):
    """Whole work-groups within the device's limit that cover every item and little more.

    numba-dpex #1308.
    """
    device = SimpleNamespace(is_cpu=is_cpu, max_work_group_size=limit)
    items, local = groups.row_groups(SimpleNamespace(sycl_device=device), fast, slow)
    assert local[0] * local[1] <= limit
    for size, group, wanted in zip(items, local, (fast, slow)):
        assert size % group == 0
        assert wanted <= size < wanted + group


@given(fast=st.integers(1, 20000), slow=st.integers(1, 70000), limit=st.sampled_from([1, 8, 64, 500, 8192]))
def test_vector_groups(fast, slow, limit):
    device = SimpleNamespace(is_cpu=True, max_work_group_size=limit)
    items, local = groups.vector_groups(SimpleNamespace(sycl_device=device), fast, slow)
    assert local[0] * local[1] <= limit
    assert items[0] == local[0] <= min(fast, groups.CPU_VECTOR)
    assert items[1] % local[1] == 0
    assert slow <= items[1] < slow + local[1]


def launch_of_write(queue, variant, *host):
    """The launch that a write of these arrays makes."""
    launches = []

    def launch(plan):
        launches.append(launch_of(plan))
        return launches[-1]

    twins = Twins(queue)
    with using(launch=launch, variant=variant):
        reshape_and_cache(*(twins.view(array) for array in host))
    (found,) = launches
    return found


def packed(size, dtype="float16"):
    base = sentinel((5, 4, 2, 2 * size), dtype)
    return base[..., :size], base[..., size:]


def interleaved(size, dtype="float16"):
    base = sentinel((5, 2, 4, 2, size), dtype)
    return base[:, 0], base[:, 1]


def separate(size, dtype="float16"):
    return sentinel((5, 4, 2, size), dtype), sentinel((5, 4, 2, size), dtype)


@pytest.mark.parametrize(
    ("make", "size", "dtype", "on_cpu", "on_gpu"),
    [
        (separate, 64, "float16", "scatter_cpu", "scatter_gpu"),
        (separate, 4, "float16", "scatter_cpu", "scatter_gpu"),
        (separate, 8, "int8", "scatter_cpu", "scatter_gpu"),
        (separate, 3, "float32", "scatter_cpu", "scatter_strided-uint64"),
        (separate, 4, "int8", "scatter_cpu", "scatter_strided-uint64"),
        (separate, 3, "float16", "scatter_strided-uint32", "scatter_strided-uint32"),
        (separate, 3, "int8", "scatter_strided-uint16", "scatter_strided-uint16"),
        (packed, 64, "float16", "scatter_strided-uint64", "scatter_strided-uint64"),
        (packed, 6, "float16", "scatter_strided-uint32", "scatter_strided-uint32"),
        (packed, 3, "float16", "scatter_strided-uint16", "scatter_strided-uint16"),
        (packed, 3, "int8", "scatter_strided-uint8", "scatter_strided-uint8"),
        (interleaved, 64, "float16", "scatter_strided-uint64", "scatter_strided-uint64"),
        (interleaved, 5, "complex64", "scatter_strided-uint64", "scatter_strided-uint64"),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_widest_word(queue, kind, make, size, dtype, on_cpu, on_gpu):
    """A plain cache takes the device's fast kernel; others the widest word that sizes and strides allow."""
    kernel = on_cpu if kind == "CPU" else on_gpu
    skip_record_on_gpu(kernel.split("-")[0], queue)
    rng = np.random.default_rng(0)
    rows = random_bits(rng, (3, 2, size), dtype), random_bits(rng, (3, 2, size), dtype)
    launch = launch_of_write(queue, f"scatter_{kind.lower()}", *rows, *make(size, dtype), np.arange(3))
    assert repr(launch).startswith(f"<launch of {kernel}-int64, global [")
