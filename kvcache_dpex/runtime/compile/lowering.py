"""What the intrinsics of kernels become in SPIR-V: types and LLVM for each of them.

Imported by `compiler` alone, once numba-dpex is there. The functions of a kernel file are compiled from
their Python; only what Python cannot say is spelled out here, and access to memory in `lowering_views`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import overload
from numba.core.typing.templates import infer, infer_global, make_intrinsic_template

from ...kernels import codecs, intrinsics, vectors

TARGET = "spirv"
SHARED = "linkonce_odr"  # for what the functions of a kernel share; `compiler` makes it internal
i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
float32 = ir.FloatType()


@functools.cache
def allow_helper(function: Callable) -> None:
    """Let kernels call a plain Python function, compiled into them."""

    def choose(*arguments):
        return function

    choose.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    overload(function, target=TARGET)(choose)


def lower(function: Callable, result: Any) -> Callable:
    """Make ``body(context, builder, types, *values)`` the LLVM of an intrinsic.

    `result` is its numba type, or a function that gives it for the types of the arguments.
    """

    def register(body: Callable) -> Callable:
        def define(context, *arguments):
            def generate(context, builder, signature, values):
                return body(context, builder, signature.args, *values)

            kind = result if isinstance(result, types.Type) else result(*arguments)
            return kind(*arguments), generate

        own = inspect.signature(define).parameters["context"]
        parameters = [own, *inspect.signature(function).parameters.values()]
        define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        template = make_intrinsic_template(
            function, define, function.__name__, prefer_literal=False, kwargs={"target": TARGET}
        )
        infer(template)
        infer_global(function, types.Function(template))
        return body

    return register


def call(builder, name: str, result: ir.Type, *values):
    """Call an external function; llvm-spirv turns ``__spirv_`` names into instructions."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    function.calling_convention = "spir_func"
    return builder.call(function, values, cconv="spir_func")


def int32(value: int):
    return ir.Constant(i32, value)


def int64(value: int):
    return ir.Constant(i64, value)


@overload(codecs.codec_of, target=TARGET)
def _codec_of(codes):
    codec = codecs.CODECS[codes.element]
    for function in vars(codec).values():
        if callable(function) and function.__module__ == codec.__name__:
            allow_helper(function)

    def codec_of(codes):
        return codec

    return codec_of


def _unrolled(parameters: str, expression: str) -> Callable:
    names: dict[str, Callable] = {}
    exec(f"def unrolled({parameters}):\n    return {expression}", names)
    return names["unrolled"]


@overload(vectors.each, target=TARGET)
def _each(function, values, *others):
    calls = [f"function(values[{lane}], *others)" for lane in range(len(values))]
    return _unrolled("function, values, *others", f"({', '.join(calls)},)")


@overload(vectors.each_pair, target=TARGET)
def _each_pair(function, first, second, *others):
    calls = [f"function(first[{lane}], second[{lane}], *others)" for lane in range(len(first))]
    return _unrolled("function, first, second, *others", f"({', '.join(calls)},)")


@overload(vectors.run_through, target=TARGET)
def _run_through(function, start, first, second):
    expression = "start"
    for lane in range(len(first)):
        expression = f"function({expression}, first[{lane}], second[{lane}])"
    return _unrolled("function, start, first, second", expression)


@overload(vectors.fold, target=TARGET)
def _fold(function, values):
    def half(start: int, stop: int) -> str:
        if stop - start == 1:
            return f"values[{start}]"
        middle = (start + stop) // 2
        return f"function({half(start, middle)}, {half(middle, stop)})"

    return _unrolled("function, values", half(0, len(values)))


@lower(intrinsics.float_bits, types.int32)
def _float_bits(context, builder, kinds, x):
    return builder.bitcast(x, i32)


@lower(intrinsics.float_from_bits, types.float32)
def _float_from_bits(context, builder, kinds, bits):
    return builder.bitcast(builder.trunc(bits, i32) if bits.type.width > 32 else bits, float32)


@lower(intrinsics.abs_bits, types.int32)
def _abs_bits(context, builder, kinds, x):
    return builder.and_(builder.bitcast(x, i32), int32(0x7FFFFFFF))


@lower(intrinsics.max_i32, types.int32)
def _max_i32(context, builder, kinds, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@lower(intrinsics.fma, types.float32)
def _fma(context, builder, kinds, x, y, z):
    return call(builder, "_Z15__spirv_ocl_fmafff", float32, x, y, z)


@lower(intrinsics.divide, types.float32)
def _divide(context, builder, kinds, x, y):
    return builder.fdiv(x, y)


@lower(intrinsics.rint_i32, types.int32)
def _rint_i32(context, builder, kinds, x):
    # 1.5 * 2**23 leaves no bit for a fraction: the addition rounds, and the low bits are the number. GPUs
    # convert and rint at a quarter of the speed of an addition.
    shifted = builder.fadd(x, ir.Constant(float32, 12582912.0))
    return builder.sub(builder.bitcast(shifted, i32), int32(0x4B400000))


@lower(intrinsics.clamp, types.float32)
def _clamp(context, builder, kinds, x, limit):
    low = builder.fneg(limit)
    above = builder.select(builder.fcmp_ordered(">=", x, low), x, low)
    return builder.select(builder.fcmp_ordered(">", above, limit), limit, above)


@lower(intrinsics.to_int8, types.int8)
def _to_int8(context, builder, kinds, value):
    return builder.trunc(value, i8)


@lower(intrinsics.float_from_int8, types.float32)
def _float_from_int8(context, builder, kinds, code):
    # A byte plus 128 in the low bits of 2**23 is 2**23 + 128 too much as a number: faster than to convert.
    byte = builder.zext(builder.xor(code, ir.Constant(i8, 0x80)), i32)
    return builder.fsub(
        builder.bitcast(builder.or_(byte, int32(0x4B000000)), float32), ir.Constant(float32, 8388736.0)
    )


@lower(intrinsics.group_max, types.int32)
def _group_max(context, builder, kinds, bits):
    work_group, reduce = int32(2), int32(0)
    return call(builder, "_Z17__spirv_GroupSMaxjji", i32, work_group, reduce, bits)


SUB_GROUP, REDUCE = 3, 0


@lower(intrinsics.lanes_sum, types.float32)
def _lanes_sum(context, builder, kinds, x):
    return call(builder, "_Z17__spirv_GroupFAddjjf", float32, int32(SUB_GROUP), int32(REDUCE), x)


@lower(intrinsics.lanes_max, lambda x: x)
def _lanes_max(context, builder, kinds, x):
    name = "_Z17__spirv_GroupFMaxjjf" if x.type == float32 else "_Z17__spirv_GroupSMaxjji"
    return call(builder, name, x.type, int32(SUB_GROUP), int32(REDUCE), x)


@lower(intrinsics.from_lane, lambda x, lane: x)
def _from_lane(context, builder, kinds, x, lane):
    lane = builder.trunc(lane, i32) if lane.type.width > 32 else lane
    letter = "f" if x.type == float32 else "i"
    return call(builder, f"_Z22__spirv_GroupBroadcastj{letter}j", x.type, int32(SUB_GROUP), x, lane)


@lower(intrinsics.barrier, types.void)
def _barrier(context, builder, kinds):
    work_group, local_memory = int32(2), int32(0x100 | 0x10)  # work-group memory, sequentially consistent
    call(builder, "_Z22__spirv_ControlBarrierjjj", ir.VoidType(), work_group, work_group, local_memory)


@lower(intrinsics.put_local, types.void)
def _put_local(context, builder, kinds, index, bits):
    builder.store(bits, _local_element(builder, index))


@lower(intrinsics.get_local, types.int32)
def _get_local(context, builder, kinds, index):
    return builder.load(_local_element(builder, index))


def _local_element(builder, index):
    """Element of the work-group's own memory, which all items of the group share."""
    name = "work_group_memory"
    memory = builder.module.globals.get(name)
    if memory is None:
        kind = ir.ArrayType(i32, intrinsics.LOCAL_WORDS)
        memory = ir.GlobalVariable(builder.module, kind, name, addrspace=3)
        memory.linkage = SHARED  # each function is a module of its own, until they are linked
        memory.initializer = ir.Constant(kind, ir.Undefined)
        memory.align = 16
    return builder.gep(memory, [int64(0), index])
