"""What access to memory becomes in SPIR-V: views, and the outermost function, which makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import models, overload, register_model

from ...kernels import views
from . import parameters
from .lowering import TARGET, allow_helper, call, float32, i8, i16, i32, i64, int32, int64, lower

_FLOATS = ("float32", "float16", "bfloat16")
# Types that numba does not have, by the bits that stand in for them.
_STORED = {
    "float16": types.uint16,
    "bfloat16": types.int16,
    "float8_e4m3fn": types.uint8,
    "float8_e5m2": types.uint8,
}


class View(types.Type):
    """numba's type of a view, from what its annotation says."""

    def __init__(self, parameter: parameters.Parameter) -> None:
        self.parameter = parameter
        self.element, self.width = parameter.element, parameter.width
        self.num_strides, self.contiguous = parameter.num_strides, parameter.contiguous
        self.scalar = types.float32 if self.element in _FLOATS else stored(self.element)
        super().__init__(f"view({self.element}*{self.width}, {self.num_strides}, {self.contiguous})")


@register_model(View)
class _ViewModel(models.StructModel):
    def __init__(self, manager, view):
        pointer = types.CPointer(stored(view.element), addrspace=1)
        strides = [(f"stride{axis}", types.int64) for axis in range(view.num_strides)]
        super().__init__(manager, view, [("pointer", pointer), *strides])


def stored(element: str) -> Any:
    """numba's type of an element in memory."""
    return _STORED.get(element) or getattr(types, element)


def numba_type(argument: str) -> Any:
    """numba's type for ``"float16*"`` or ``"int64"``."""
    if argument.endswith("*"):
        return types.CPointer(stored(argument[:-1]), addrspace=1)
    return getattr(types, argument)


def outermost(function: Callable, texts: Sequence[str], in_record: bool) -> tuple[Callable, tuple]:
    """A kernel that takes what a launch passes and calls `function`, and the types of its arguments."""
    flat = [numba_type(text) for text in parameters.flattened(texts)]
    given = (types.int64,) if in_record else tuple(flat)
    kinds = [_type_of(text) for text in texts]
    made = types.Tuple([kind for kind in kinds if kind is not None])

    def arguments_of(flat):
        raise NotImplementedError("only its lowering is used")

    @lower(arguments_of, made)
    def _arguments_of(context, builder, _, values):
        if in_record:
            words = builder.inttoptr(builder.extract_value(values, 0), ir.PointerType(i64, addrspace=1))
            values = [_member(builder, words, number, kind) for number, kind in enumerate(flat)]
        else:
            values = cgutils.unpack_tuple(builder, values)
        count = sum(isinstance(kind, types.CPointer) for kind in flat)

        def view(parameter, pointer, strides):
            proxy = cgutils.create_struct_proxy(View(parameter))(context, builder)
            proxy.pointer = pointer
            for axis, stride in enumerate(strides):
                setattr(proxy, f"stride{axis}", stride)
            return proxy._getvalue()

        listed = parameters.grouped(texts, values[:count], values[count:], view)
        return context.make_tuple(builder, made, [each for each in listed if not isinstance(each, int)])

    allow_helper(function)
    names = [f"a{number}" for number in range(len(given))]
    passed = iter(range(len(kinds)))
    handed = [text if kind is None else f"made[{next(passed)}]" for text, kind in zip(texts, kinds)]
    source = f"""def kernel(item, {", ".join(names)}):
    made = arguments_of(({", ".join(names)},))
    function(item, {", ".join(handed)})"""
    namespace = {"arguments_of": arguments_of, "function": function}
    exec(source, namespace)
    return namespace["kernel"], given


def _type_of(text: str) -> Any:
    """numba's type of an argument of the kernel; None of a constant."""
    parameter = parameters.parse(text)
    if parameter.kind == "view":
        return View(parameter)
    return None if parameter.kind == "constant" else numba_type(text)


def _member(builder, words, number: int, kind: Any):
    """A word of a record, as the argument that it holds."""
    word = builder.load(builder.gep(words, [int64(number)]))
    if not isinstance(kind, types.CPointer):
        return word
    element = float32 if kind.dtype == types.float32 else ir.IntType(kind.dtype.bitwidth)
    return builder.inttoptr(word, ir.PointerType(element, addrspace=1))


def _load_at(view, index):
    raise NotImplementedError("only its lowering is used")


def _store_at(view, value, index):
    raise NotImplementedError("only its lowering is used")


def _zero_at(view, index):
    raise NotImplementedError("only its lowering is used")


def _row_at(view, index):
    raise NotImplementedError("only its lowering is used")


@overload(views.load, target=TARGET)
def _load(view, *index):
    return lambda view, *index: _load_at(view, index)


@overload(views.store, target=TARGET)
def _store(view, value, *index):
    return lambda view, value, *index: _store_at(view, value, index)


@overload(views.store_zero, target=TARGET)
def _store_zero(view, *index):
    return lambda view, *index: _zero_at(view, index)


@overload(views.row_from, target=TARGET)
def _row_from(view, *index):
    return lambda view, *index: _row_at(view, index)


@lower(views.is_contiguous, types.boolean)
def _is_contiguous(context, builder, kinds, view):
    return ir.Constant(ir.IntType(1), int(kinds[0].contiguous))


def _loaded(view, index):
    value = types.UniTuple(view.scalar, view.width) if view.width > 1 else view.scalar
    return types.UniTuple(value, len(index[-1])) if isinstance(index[-1], types.BaseTuple) else value


@lower(_load_at, _loaded)
def _(context, builder, kinds, view, index):
    pointer, places = _places(context, builder, kinds[0], view, kinds[-1], index)
    values = [_load_element(builder, kinds[0], pointer, place) for place in places]
    return cgutils.pack_array(builder, values) if isinstance(kinds[-1][-1], types.BaseTuple) else values[0]


@lower(_store_at, types.void)
def _(context, builder, kinds, view, value, index):
    pointer, places = _places(context, builder, kinds[0], view, kinds[-1], index)
    many = isinstance(kinds[-1][-1], types.BaseTuple)
    if isinstance(kinds[1], types.Integer):
        value = context.cast(builder, value, kinds[1], kinds[0].scalar)
    for place, each in zip(places, cgutils.unpack_tuple(builder, value) if many else [value]):
        _store_element(builder, kinds[0], pointer, place, each)


@lower(_zero_at, types.void)
def _(context, builder, kinds, view, index):
    pointer, places = _places(context, builder, kinds[0], view, kinds[1], index)
    zero = ir.Constant(context.get_value_type(kinds[0].scalar), 0)
    zeros = zero if kinds[0].width == 1 else cgutils.pack_array(builder, [zero] * kinds[0].width)
    for place in places:
        _store_element(builder, kinds[0], pointer, place, zeros)


def _row_type(view, index):
    return View(view.parameter._replace(axes=view.parameter.axes[-1:]))


@lower(_row_at, _row_type)
def _(context, builder, kinds, view, index):
    pointer, (place,) = _places(context, builder, kinds[0], view, kinds[1], index)
    row = cgutils.create_struct_proxy(_row_type(*kinds))(context, builder)
    row.pointer = builder.gep(pointer, [builder.mul(place, int64(kinds[0].width))])
    if not kinds[0].contiguous:
        last = f"stride{kinds[0].num_strides - 1}"
        row.stride0 = getattr(cgutils.create_struct_proxy(kinds[0])(context, builder, view), last)
    return row._getvalue()


def _places(context, builder, view, value, kinds, index):
    """The pointer of a view, and which of its elements an index means: one, or one for each last index."""
    proxy = cgutils.create_struct_proxy(view)(context, builder, value)
    strides = [getattr(proxy, f"stride{axis}") for axis in range(view.num_strides)] + [int64(1)]

    def step(axis, kind, number):
        return builder.mul(context.cast(builder, number, kind, types.int64), strides[axis])

    *outer, last = zip(kinds, cgutils.unpack_tuple(builder, index, len(kinds)))
    start = int64(0)
    for axis, (kind, number) in enumerate(outer):
        start = builder.add(start, step(axis, kind, number))
    kind, number = last
    if not isinstance(kind, types.BaseTuple):
        return proxy.pointer, [builder.add(start, step(len(outer), kind, number))]
    numbers = cgutils.unpack_tuple(builder, number, len(kind))
    return proxy.pointer, [builder.add(start, step(len(outer), *each)) for each in zip(kind, numbers)]


def _neighbours(builder, pointer, element: ir.Type, place, count: int):
    """Addresses of vector number `place` of `count` elements; Intel's compiler makes one message of them."""
    pointer = builder.bitcast(pointer, ir.PointerType(element, addrspace=1))
    first = builder.mul(place, int64(count))
    return [builder.gep(pointer, [builder.add(first, int64(lane))]) for lane in range(count)]


def _load_element(builder, view, pointer, place):
    width = view.width
    if view.element == "float16":
        return _load_halves(builder, pointer, place, width)
    if width == 1:
        value = builder.load(builder.gep(pointer, [place]))
        return _widen(builder, builder.zext(value, i32)) if view.element == "bfloat16" else value
    if view.element == "bfloat16":
        words = map(builder.load, _neighbours(builder, pointer, i32, place, width // 2))
        return cgutils.pack_array(builder, [each for word in words for each in _two_bfloat16(builder, word)])
    if view.scalar.bitwidth == 8:
        words = _unpacked(builder, builder.load(_word_address(builder, pointer, place, width), align=width))
        return cgutils.pack_array(builder, [each for word in words for each in _four_bytes(builder, word)])
    addresses = _neighbours(builder, pointer, pointer.type.pointee, place, width)
    return cgutils.pack_array(builder, [builder.load(address) for address in addresses])


def _store_element(builder, view, pointer, place, value):
    width = view.width
    if view.element == "float16":
        _store_halves(builder, pointer, place, value, width)
    elif width == 1:
        value = builder.trunc(_narrow(builder, value), i16) if view.element == "bfloat16" else value
        builder.store(value, builder.gep(pointer, [place]))
    elif view.element == "bfloat16":
        bits = [_narrow(builder, each) for each in cgutils.unpack_tuple(builder, value, width)]
        words = [builder.or_(low, builder.shl(high, int32(16))) for low, high in zip(bits[::2], bits[1::2])]
        for word, address in zip(words, _neighbours(builder, pointer, i32, place, width // 2)):
            builder.store(word, address)
    elif view.scalar.bitwidth == 8:
        codes = cgutils.unpack_tuple(builder, value, width)
        fours = [_vector(builder, i8, codes[lane : lane + 4]) for lane in range(0, width, 4)]
        words = [builder.bitcast(four, i32) for four in fours]
        words = _vector(builder, i32, words) if width > 4 else words[0]
        builder.store(words, _word_address(builder, pointer, place, width), align=width)
    else:
        addresses = _neighbours(builder, pointer, pointer.type.pointee, place, width)
        for each, address in zip(cgutils.unpack_tuple(builder, value, width), addresses):
            builder.store(each, address)


def _load_halves(builder, pointer, place, width: int):
    if width == 1:
        return _from_half(builder, builder.zext(builder.load(builder.gep(pointer, [place])), i32))
    halves = builder.bitcast(pointer, ir.PointerType(ir.HalfType(), addrspace=1))
    kind = ir.VectorType(float32, width)
    name = "_Z24__spirv_ocl_vloada_halfnmPU3AS1Dhi"
    return cgutils.pack_array(
        builder, _unpacked(builder, call(builder, name, kind, place, halves, int32(width)))
    )


def _from_half(builder, bits):
    """float16 bits as float32. A CPU device makes no vectors of vload_half, but does of integers."""
    magnitude = builder.shl(builder.and_(bits, int32(0x7FFF)), int32(13))
    exponent = builder.and_(magnitude, int32(0x0F800000))
    normal = builder.add(magnitude, int32(112 << 23))  # 112: the difference of the exponents' biases
    beyond = builder.add(normal, int32(112 << 23))  # infinity and NaN
    least = builder.bitcast(builder.add(normal, int32(1 << 23)), float32)  # 2**-14 plus a subnormal half
    subnormal = builder.bitcast(builder.fsub(least, ir.Constant(float32, 2.0**-14)), i32)
    finite = builder.select(builder.icmp_unsigned("==", exponent, int32(0)), subnormal, normal)
    is_beyond = builder.icmp_unsigned("==", exponent, int32(0x0F800000))
    sign = builder.shl(builder.and_(bits, int32(0x8000)), int32(16))
    return builder.bitcast(builder.or_(builder.select(is_beyond, beyond, finite), sign), float32)


def _store_halves(builder, pointer, place, value, width: int):
    halves = builder.bitcast(pointer, ir.PointerType(ir.HalfType(), addrspace=1))
    name = "_Z25__spirv_ocl_vstore_half_rfmPU3AS1Dhi"
    if width > 1:
        name = f"_Z27__spirv_ocl_vstorea_halfn_rDv{width}_fmPU3AS1Dhi"
        value = _vector(builder, float32, cgutils.unpack_tuple(builder, value, width))
    call(builder, name, ir.VoidType(), value, place, halves, int32(0))  # 0: to nearest even


def _widen(builder, bits):
    """bfloat16 bits as float32."""
    return builder.bitcast(builder.shl(bits, int32(16)), float32)


def _two_bfloat16(builder, word):
    return _widen(builder, word), builder.bitcast(builder.and_(word, int32(0xFFFF0000)), float32)


def _narrow(builder, value):
    """float32 as bfloat16 bits: to nearest even, NaN kept."""
    bits = builder.bitcast(value, i32)
    high = builder.lshr(bits, int32(16))
    rounded = builder.add(bits, builder.add(builder.and_(high, int32(1)), int32(0x7FFF)))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, int32(0x7FFFFFFF)), int32(0x7F800000))
    return builder.select(is_nan, high, builder.lshr(rounded, int32(16)))


def _word_address(builder, pointer, place, width: int):
    """Address of `width` bytes, as a 32-bit word or a vector of them."""
    words = i32 if width == 4 else ir.VectorType(i32, width // 4)
    return builder.gep(builder.bitcast(pointer, ir.PointerType(words, addrspace=1)), [place])


def _four_bytes(builder, word):
    return [builder.trunc(builder.lshr(word, int32(8 * number)), i8) for number in range(4)]


def _vector(builder, element: ir.Type, values):
    vector = ir.Constant(ir.VectorType(element, len(values)), ir.Undefined)
    for lane, value in enumerate(values):
        vector = builder.insert_element(vector, value, int32(lane))
    return vector


def _unpacked(builder, vector):
    if not isinstance(vector.type, ir.VectorType):
        return [vector]
    return [builder.extract_element(vector, int32(lane)) for lane in range(vector.type.count)]
