"""What `kernels.device` becomes in SPIR-V: types and LLVM for each of its functions.

Imported by `compiler` alone, once numba-dpex is there. A helper of a kernel file is compiled from
its Python; only what Python cannot say is spelled out here.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import overload
from numba.core.typing.templates import infer, infer_global, make_intrinsic_template

from ...kernels import device

_TARGET = "spirv"
_i8, _i32, _i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_half, _float, _float8 = ir.HalfType(), ir.FloatType(), ir.VectorType(ir.FloatType(), 8)
_pair = ir.VectorType(_i32, 2)
_quad = types.UniTuple(types.float32, 4)
_bfloat16, _float16 = types.int16, types.uint16


def numba_type(argument: str) -> Any:
    """numba's type for an annotation such as ``"float16*"`` or ``"int64"``."""
    if not argument.endswith("*"):
        return getattr(types, argument)
    bits = {"float16": _float16, "bfloat16": _bfloat16}
    element = argument[:-1]
    return types.CPointer(bits.get(element) or getattr(types, element), addrspace=1)


@functools.cache
def allow_helper(function: Callable) -> None:
    """Let kernels call a plain Python function, compiled into them."""

    def choose(*arguments):
        return function

    choose.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    overload(function, target=_TARGET)(choose)


def _lower(function: Callable, result: Any) -> Callable:
    """Make `body(builder, types, *values)` the LLVM of a device function."""

    def register(body: Callable) -> Callable:
        def define(context, *arguments):
            def generate(context, builder, signature, values):
                return body(builder, signature.args, *values)

            return result(*arguments), generate

        own = inspect.signature(define).parameters["context"]
        parameters = [own, *inspect.signature(function).parameters.values()]
        define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        template = make_intrinsic_template(
            function, define, function.__name__, prefer_literal=False, kwargs={"target": _TARGET}
        )
        infer(template)
        infer_global(function, types.Function(template))
        return body

    return register


def in_record(function: Callable, kinds: tuple) -> tuple[Callable, tuple]:
    """A kernel that finds `function`'s arguments behind an address, and the types of its own."""

    def members(address):
        raise NotImplementedError("only its lowering is used")

    def kernel(item, address):
        function(item, *members(address))

    @_lower(members, types.Tuple(kinds))
    def _members(builder, _, address):
        words = builder.inttoptr(address, ir.PointerType(_i64, addrspace=1))
        values = _neighbours(builder, words, ir.Constant(_i64, 0), len(kinds))
        return cgutils.pack_struct(builder, [_member(builder, *each) for each in zip(kinds, values)])

    allow_helper(function)
    return kernel, (types.int64,)


def _member(builder, kind, word):
    """A word of a record as a kernel's argument."""
    if not isinstance(kind, types.CPointer):
        return word
    element = _float if kind.dtype == types.float32 else ir.IntType(kind.dtype.bitwidth)
    return builder.inttoptr(word, ir.PointerType(element, addrspace=1))


def _call(builder, name: str, result: ir.Type, *values):
    """Call an external function; llvm-spirv turns ``__spirv_`` names into instructions."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    function.calling_convention = "spir_func"
    return builder.call(function, values, cconv="spir_func")


def _int32(value: int):
    return ir.Constant(_i32, value)


def _address(builder, pointer, index):
    return builder.gep(pointer, [index])


def _half_pointer(builder, pointer):
    return builder.bitcast(pointer, ir.PointerType(_half, addrspace=1))


def _widen(builder, bits):
    """bfloat16 bits as float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, _i32), _int32(16)), _float)


def _narrow(builder, value):
    """float32 as bfloat16 bits: to nearest even, NaN kept."""
    bits = builder.bitcast(value, _i32)
    high = builder.lshr(bits, _int32(16))
    rounded = builder.add(bits, builder.add(builder.and_(high, _int32(1)), _int32(0x7FFF)))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, _int32(0x7FFFFFFF)), _int32(0x7F800000))
    return builder.trunc(builder.select(is_nan, high, builder.lshr(rounded, _int32(16))), ir.IntType(16))


def _tuple(builder, values):
    return cgutils.pack_array(builder, values)


@_lower(device.wide, types.int64)
def _wide(builder, kinds, pointer):
    return ir.Constant(_i64, 128 // kinds[0].dtype.bitwidth)


@_lower(device.load, types.float32)
def _load(builder, kinds, pointer, index):
    if kinds[0].dtype == _float16:
        name = "_Z22__spirv_ocl_vload_halfmPU3AS1Dh"
        return _call(builder, name, _float, index, _half_pointer(builder, pointer))
    value = builder.load(_address(builder, pointer, index))
    return _widen(builder, value) if kinds[0].dtype == _bfloat16 else value


@_lower(device.load8, types.UniTuple(types.float32, 8))
def _load8(builder, kinds, pointer, index):
    if kinds[0].dtype == _float16:
        name = "_Z24__spirv_ocl_vloada_halfnmPU3AS1Dhi"
        eights = builder.lshr(index, ir.Constant(_i64, 3))
        vector = _call(builder, name, _float8, eights, _half_pointer(builder, pointer), _int32(8))
        return _tuple(builder, [builder.extract_element(vector, _int32(lane)) for lane in range(8)])
    if kinds[0].dtype == _bfloat16:
        words = builder.bitcast(pointer, ir.PointerType(_i32, addrspace=1))
        at = builder.lshr(index, ir.Constant(_i64, 1))
        halves = []
        for word in _neighbours(builder, words, at, 4):
            halves += [builder.shl(word, _int32(16)), builder.and_(word, _int32(0xFFFF0000))]
        return _tuple(builder, [builder.bitcast(bits, _float) for bits in halves])
    return _tuple(builder, _neighbours(builder, pointer, index, 8))


def _neighbours(builder, pointer, index, count: int):
    """Elements from an index on; Intel's compiler makes one message of them."""
    return [builder.load(_address(builder, pointer, place)) for place in _places(builder, index, count)]


def _places(builder, index, count: int):
    return [builder.add(index, ir.Constant(_i64, lane)) for lane in range(count)]


@_lower(device.store, types.void)
def _store(builder, kinds, pointer, index, value):
    if kinds[0].dtype == _float16:
        name = "_Z25__spirv_ocl_vstore_half_rfmPU3AS1Dhi"
        _call(builder, name, ir.VoidType(), value, index, _half_pointer(builder, pointer), _int32(0))
    else:
        if kinds[0].dtype == _bfloat16:
            value = _narrow(builder, value)
        builder.store(value, _address(builder, pointer, index))


@_lower(device.store4, types.void)
@_lower(device.store8, types.void)
def _store_vector(builder, kinds, pointer, index, *values):
    count = len(values)
    if kinds[0].dtype == _float16:
        vector = ir.Constant(ir.VectorType(_float, count), ir.Undefined)
        for lane, value in enumerate(values):
            vector = builder.insert_element(vector, value, _int32(lane))
        vectors = builder.lshr(index, ir.Constant(_i64, count.bit_length() - 1))
        name = f"_Z27__spirv_ocl_vstorea_halfn_rDv{count}_fmPU3AS1Dhi"
        _call(builder, name, ir.VoidType(), vector, vectors, _half_pointer(builder, pointer), _int32(0))
        return
    if kinds[0].dtype == _bfloat16:
        bits = [builder.zext(_narrow(builder, value), _i32) for value in values]
        pairs = zip(bits[::2], bits[1::2])
        values = tuple(builder.or_(low, builder.shl(high, _int32(16))) for low, high in pairs)
        pointer = builder.bitcast(pointer, ir.PointerType(_i32, addrspace=1))
        index = builder.lshr(index, ir.Constant(_i64, 1))
    for place, value in zip(_places(builder, index, len(values)), values):
        builder.store(value, _address(builder, pointer, place))


@_lower(device.load_pair, types.UniTuple(types.uint32, 2))
def _load_pair(builder, kinds, pointer, index):
    pair = builder.load(_pair_address(builder, pointer, index), align=8)
    return _tuple(builder, [builder.extract_element(pair, _int32(lane)) for lane in range(2)])


@_lower(device.store_pair, types.void)
def _store_pair(builder, kinds, pointer, index, low, high):
    pair = ir.Constant(_pair, ir.Undefined)
    for lane, word in enumerate((low, high)):
        pair = builder.insert_element(pair, word, _int32(lane))
    builder.store(pair, _pair_address(builder, pointer, index), align=8)


def _pair_address(builder, pointer, index):
    pairs = builder.bitcast(pointer, ir.PointerType(_pair, addrspace=1))
    return _address(builder, pairs, builder.lshr(index, ir.Constant(_i64, 1)))


@_lower(device.magnitude, types.int32)
def _magnitude(builder, kinds, x):
    return builder.and_(builder.bitcast(x, _i32), _int32(0x7FFFFFFF))


@_lower(device.number, types.float32)
def _number(builder, kinds, bits):
    return builder.bitcast(builder.trunc(bits, _i32) if bits.type.width > 32 else bits, _float)


@_lower(device.larger, types.int32)
def _larger(builder, kinds, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@_lower(device.fma, types.float32)
def _fma(builder, kinds, x, y, z):
    return _call(builder, "_Z15__spirv_ocl_fmafff", _float, x, y, z)


@_lower(device.divide, types.float32)
def _divide(builder, kinds, x, y):
    return builder.fdiv(x, y)


@_lower(device.nearest, types.int32)
def _nearest(builder, kinds, x):
    # 1.5 * 2**23 leaves no bit for a fraction: the addition rounds, and the low bits are the number. GPUs
    # convert and rint at a quarter of the speed of an addition.
    shifted = builder.fadd(x, ir.Constant(_float, 12582912.0))
    return builder.sub(builder.bitcast(shifted, _i32), _int32(0x4B400000))


@_lower(device.limited, types.float32)
def _limited(builder, kinds, x, limit):
    low = builder.fneg(limit)
    above = builder.select(builder.fcmp_ordered(">=", x, low), x, low)
    return builder.select(builder.fcmp_ordered(">", above, limit), limit, above)


@_lower(device.pack4, types.uint32)
def _pack4(builder, kinds, *values):
    codes = ir.Constant(ir.VectorType(_i8, 4), ir.Undefined)
    for lane, value in enumerate(values):
        codes = builder.insert_element(codes, builder.trunc(value, _i8), _int32(lane))
    return builder.bitcast(codes, _i32)


@_lower(device.unpack4, _quad)
def _unpack4(builder, kinds, word):
    # A byte plus 128 in the low bits of 2**23 is 2**23 + 128 too much as a number.
    flipped = builder.xor(word, _int32(0x80808080))

    def lane(number):
        byte = builder.and_(builder.lshr(flipped, _int32(8 * number)), _int32(0xFF))
        biased = builder.bitcast(builder.or_(byte, _int32(0x4B000000)), _float)
        return builder.fsub(biased, ir.Constant(_float, 8388736.0))

    return _tuple(builder, [lane(number) for number in range(4)])


@_lower(device.code, types.int8)
def _code(builder, kinds, value):
    return builder.trunc(value, _i8)


@_lower(device.group_larger, types.int32)
def _group_larger(builder, kinds, bits):
    work_group, reduce = _int32(2), _int32(0)
    return _call(builder, "_Z17__spirv_GroupSMaxjji", _i32, work_group, reduce, bits)


@_lower(device.barrier, types.void)
def _barrier(builder, kinds):
    work_group, local_memory = _int32(2), _int32(0x100 | 0x10)  # work-group memory, sequentially consistent
    _call(builder, "_Z22__spirv_ControlBarrierjjj", ir.VoidType(), work_group, work_group, local_memory)


@_lower(device.put_local, types.void)
def _put_local(builder, kinds, index, bits):
    builder.store(bits, _local_element(builder, index))


@_lower(device.get_local, types.int32)
def _get_local(builder, kinds, index):
    return builder.load(_local_element(builder, index))


def _local_element(builder, index):
    """Element of the work-group's own memory, which all items of the group share."""
    name = "work_group_memory"
    memory = builder.module.globals.get(name)
    if memory is None:
        kind = ir.ArrayType(_i32, device.LOCAL_WORDS)
        memory = ir.GlobalVariable(builder.module, kind, name, addrspace=3)
        memory.linkage = "internal"
        memory.initializer = ir.Constant(kind, ir.Undefined)
        memory.align = 16
    return builder.gep(memory, [ir.Constant(_i64, 0), index])
