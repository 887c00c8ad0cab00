"""What kernels carry through loops, and what their helpers share, once they are compiled."""

import numpy as np
import pytest

from helpers import compiled, to_device
from kvcache_dpex import reference
from kvcache_dpex.kernels.intrinsics import barrier, float_bits, float_from_bits, get_local, put_local
from kvcache_dpex.kernels.vectors import each, each_pair
from kvcache_dpex.kernels.views import load, store
from kvcache_dpex.runtime.compile import compiler, phis, spirv
from kvcache_dpex.runtime.launch import arrays, launch

needs_compiler = pytest.mark.skipif(not compiler.available(), reason="numba-dpex is not installed")
ZEROS = (np.float32(0.0),) * 4
LANES = tuple(range(4))
OP_TYPE_ARRAY, OP_PHI = 28, 245

LOOP = """\
define void @f([2 x float] %a, i64 %n) {
entry:
  br label %loop

loop:                                             ; preds = %loop, %entry
  %0 = phi i64 [ 0, %entry ], [ %2, %loop ]
  %1 = phi [2 x float] [ zeroinitializer, %entry ], [ %a, %loop ]
  %2 = add i64 %0, 1
  %3 = icmp slt i64 %2, %n
  br i1 %3, label %loop, label %end

end:                                              ; preds = %loop
  ret void
}
"""


def plus(total, value):
    return total + value


def sums(item: "item[1]", x: "float32[row, element]", out: "float32[element]", rows: "int64"):
    """Four sums over the rows, as a tuple that the loop carries."""
    total = ZEROS
    for row in range(rows):
        total = each_pair(plus, total, load(x, row, LANES))
    store(out, total, LANES)


def of_neighbour(lane, lanes):
    return float_from_bits(get_local((lane + 1) & (lanes - 1)))


def turned(item: "nditem[1]", x: "float32[n]", out: "float32[n]", lanes: "int64"):
    """Each item's neighbour's value, by way of the memory of the work-group, which a helper reads."""
    lane = item.get_local_id(0)
    put_local(lane, float_bits(load(x, lane)))
    barrier()
    store(out, of_neighbour(lane, lanes), lane)


def twice(x):
    return x + x


def doubled(item: "item[1]", x: "value*width[part=1]", out: "value*width[part=1]"):
    at = item.get_id(0)
    store(out, each(twice, load(x, at)), at)


def run(queue, kernel, x, size, numbers, items):
    given, out = to_device(x, queue), to_device(np.zeros(size, "f4"), queue)
    launched = launch.Launch(compiled(kernel), queue, numbers, (items,), (items,))
    launched((given._pointer, out._pointer), (given, out))
    queue.wait()
    return arrays.to_numpy(out)


@needs_compiler
def test_a_tuple_that_a_loop_carries(queue):
    x = np.arange(12, dtype="f4").reshape(3, 4)
    np.testing.assert_array_equal(run(queue, sums, x, 4, (4, 1, 1, 3), 1), x.sum(0))
    code = list(spirv.instructions(compiled(sums).binary))
    array_types = {operands[0] for opcode, operands in code if opcode == OP_TYPE_ARRAY}
    assert not array_types & {operands[0] for opcode, operands in code if opcode == OP_PHI}


@needs_compiler
def test_helpers_share_the_memory_of_the_work_group(queue):
    """Every function is compiled for itself; the linker must not give each a memory of its own."""
    x = np.arange(8, dtype="f4")
    np.testing.assert_array_equal(run(queue, turned, x, 8, (1, 1, 8), 8), np.roll(x, -1))


@needs_compiler
@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("value", ["float16", "bfloat16", "float32"])
def test_vectors_of_every_width(queue, value, width):
    whole = np.arange(1, 33, dtype="f4")
    bits = reference.from_float32(whole, value)
    x, out = to_device(bits, queue), to_device(np.zeros_like(bits), queue)
    module = compiled(doubled, value=value, width=width)
    launch.Launch(module, queue, (), (32 // width,), (1,))((x._pointer, out._pointer), (x, out))
    queue.wait()
    np.testing.assert_array_equal(reference.as_float32(arrays.to_numpy(out), value), 2 * whole)


@needs_compiler
def test_every_edge_hands_its_part():
    import llvmlite.binding as llvm

    text = phis.split(LOOP)
    assert "phi [2 x float]" not in text
    assert text.count("phi float") == 2
    assert text.count("extractvalue [2 x float] %a") == 2
    llvm.parse_assembly(text).verify()


def test_modules_without_tuples_stay_as_they_are():
    text = LOOP.replace("  %1 = phi [2 x float] [ zeroinitializer, %entry ], [ %a, %loop ]\n", "")
    assert phis.split(text) == text
