# ruff: noqa: F722, F821  (annotations are the kernel's argument types)
"""launch_kernel: a kernel of one's own, and what it is told that does not fit."""

import dpnp
import numpy as np
import pytest

import kvcache_dpex as kv
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.kernels.scatter_strided import scatter_strided
from kvcache_dpex.kernels.views import load
from kvcache_dpex.runtime.compile import compiler


def double(item: "item[2]", source: "float32[row, column]", target: "float32*", columns: "int64"):
    column = item.get_id(0)
    row = item.get_id(1)
    target[row * columns + column] = 2 * load(source, row, column)


def array(values, queue):
    return dpnp.asarray(values, sycl_queue=queue)


def scatter(queue, **changes):
    """A write of two rows by the package's own kernel, and the caches after it."""
    rows = array(np.arange(2 * 3 * 5, dtype="float32").reshape(2, 3, 5), queue)
    caches = [array(np.full((4, 2, 3, 5), 77, "float32"), queue) for _ in range(2)]
    given = {
        "key": rows,
        "value": -rows,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slots": array([6, 3], queue),
        "numbers": (2, 8, 2, 5, 5),
        "global_size": (5, 3, 8),
        "local_size": (5, 1, 8),
        "word": "uint32",
        **changes,
    }
    *arrays, numbers, size, local, word = given.values()
    kv.launch_kernel(scatter_strided, size, *arrays, *numbers, local_size=local, word=word, slot="int64")
    return rows, caches


def test_whole_caches(queue):
    rows, caches = scatter(queue)
    for cache, sign in zip(caches, (1, -1)):
        expected = np.full((8, 3, 5), 77, "float32")
        expected[[6, 3]] = sign * dpnp.asnumpy(rows)
        np.testing.assert_array_equal(dpnp.asnumpy(cache).reshape(8, 3, 5), expected)


@pytest.mark.skipif(not compiler.available(), reason="compiling in this process needs numba-dpex")
def test_a_kernel_that_is_not_in_the_package(queue):
    """A view takes strides, a pointer follows it, and an edited constant of the call counts."""
    source = array(np.arange(24, dtype="float32").reshape(4, 6), queue)
    for part in (source[:, ::2], source[::-1, :3]):
        target = array(np.full((5, 3), 77, "float32"), queue)
        kv.launch_kernel(double, (3, 4), part, target, 3)
        expected = np.full((5, 3), 77, "float32")
        expected[:4] = 2 * dpnp.asnumpy(part)
        np.testing.assert_array_equal(dpnp.asnumpy(target), expected)


REFUSED = [
    ({"numbers": (2, 8)}, TypeError, r"scatter_strided takes 10 arguments \(key, .*\), got 7"),
    ({"numbers": (2, 8, 2, 5, 5.0)}, TypeError, "`value_size` must be an int, got 5.0"),
    ({"word": "uint64"}, TypeError, r"`key` must have elements of 8 bytes \(uint64\), got float32"),
    ({"slots": np.arange(2)}, TypeError, "`slot_mapping` must be a dpnp array"),
    ({"local_size": None}, ValueError, "`local_size` must be given"),
    ({"global_size": (8, 3)}, ValueError, r"`global_size` must have 3 axes as nditem\[3\] has"),
    (
        {"global_size": (9, 3, 8)},
        ValueError,
        r"whole work-groups of \[5, 1, 8\], got \[9, 3, 8\]",
    ),
    ({"word": "text"}, kv.KernelError, "'text' is no type"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSED, ids=lambda each: str(each)[:30])
def test_what_does_not_fit_is_refused(queue, changes, kind, message):
    with pytest.raises(kind, match=message):
        scatter(queue, **changes)


def test_axes_and_pointers(queue):
    flat = array(np.zeros(12, "float32"), queue)
    with pytest.raises(ValueError, match=r"`source` must have the axes \['row', 'column'\]"):
        kv.launch_kernel(double, (3, 4), flat, flat, 3)
    wide = array(np.zeros((4, 6), "float32"), queue)
    with pytest.raises(ValueError, match="`target` is a pointer and must be contiguous"):
        kv.launch_kernel(double, (3, 4), wide, wide[:, ::2], 3)


def test_vectors_need_rows_without_gaps(queue):
    rows, slots = [array(np.zeros((4, 8), "uint64"), queue)[:, 1:5]] * 4, array([1, 2], queue)
    with pytest.raises(ValueError, match="the strides or the address of an array do not fit its view"):
        kv.launch_kernel(scatter_gpu, (8, 8), *rows, slots, 2, 4, 2, local_size=(8, 8), slot="int64")
