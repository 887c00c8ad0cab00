"""Functions that kernels may call: plain Python here, a few instructions of SPIR-V once compiled.

`runtime.compile.lowering` holds the compiled side of each. A pointer's type says what its bits mean:
float32, float16 (their bits arrive as uint16) or bfloat16 (as int16, since NumPy has no such type).
"""

import threading

import numpy as np


def wide(pointer):
    """How many values of its type fill 16 bytes, the widest access of an item."""
    return 16 // pointer[0].itemsize


def load(pointer, index):
    """The value at an index, as float32."""
    value = pointer[index]
    if value.dtype == np.int16:
        return (value.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.float32(value)


def load8(pointer, index):
    """Eight neighbouring values, as float32; `index` is a multiple of 8."""
    return tuple(load(pointer, index + lane) for lane in range(8))


def store(pointer, index, value):
    """Round a float32 to the pointer's type, once, to nearest even."""
    if pointer[index].dtype == np.int16:
        bits = int(np.float32(value).view(np.uint32))
        bits += 0x7FFF + (bits >> 16 & 1) if bits & 0x7FFFFFFF <= 0x7F800000 else 0
        pointer[index] = np.uint16(bits >> 16 & 0xFFFF).view(np.int16)
    else:
        with np.errstate(over="ignore"):
            pointer[index] = value


def store4(pointer, index, a, b, c, d):
    """`store` of four neighbours; `index` is a multiple of 4."""
    for lane, value in enumerate((a, b, c, d)):
        store(pointer, index + lane, value)


def store8(pointer, index, a, b, c, d, e, f, g, h):
    """`store` of eight neighbours; `index` is a multiple of 8."""
    for lane, value in enumerate((a, b, c, d, e, f, g, h)):
        store(pointer, index + lane, value)


def load_pair(pointer, index):
    """Two neighbouring words; `index` is a multiple of 2."""
    return pointer[index], pointer[index + 1]


def store_pair(pointer, index, low, high):
    """Two neighbouring words; `index` is a multiple of 2."""
    pointer[index] = low
    pointer[index + 1] = high


def magnitude(x):
    """Bits of ``|x|``: for numbers as ordered as they are, infinity above them, NaN above all."""
    return np.int32(np.float32(x).view(np.int32) & 0x7FFFFFFF)


def number(bits):
    """The float32 of an int32's bits."""
    return np.int32(bits).view(np.float32)


def larger(a, b):
    """The larger of two int32."""
    return np.int32(max(a, b))


def fma(x, y, z):
    """``x * y + z`` in float32, rounded once."""
    with np.errstate(all="ignore"):
        product = np.float64(x) * np.float64(y)  # exact
        total = product + np.float64(z)
        if np.isfinite(total):
            # Round to odd, so that rounding to float32 afterwards is as good as rounding once.
            other = total - product
            error = (product - (total - other)) + (np.float64(z) - other)
            if error != 0 and not total.view(np.int64) & 1:
                total = np.nextafter(total, np.copysign(np.inf, error))
        return np.float32(total)


def divide(x, y):
    """About ``x / y`` in float32: a device may be off by 2.5 units in the last place."""
    with np.errstate(all="ignore"):
        return np.float32(x) / np.float32(y)


def nearest(x):
    """The int32 nearest to a float32 below 2**22, ties to even; NaN and others give some int32."""
    whole = np.rint(np.float32(x))
    return np.int32(whole) if abs(whole) < 2**22 else np.int32(2**22)


def limited(x, limit):
    """A float32, but no further from 0 than `limit`; NaN gives -`limit`."""
    above = x if x >= -limit else -limit
    return np.float32(min(above, limit))


def pack4(a, b, c, d):
    """The lowest bytes of four int32 in one uint32, that of `a` in its lowest byte."""
    return np.array([a, b, c, d], np.int32).astype(np.uint8).view(np.uint32)[0]


def unpack4(word):
    """Four int8 of a uint32 as float32, the lowest byte first."""
    return tuple(np.array([word], np.uint32).view(np.int8).astype(np.float32))


def code(value):
    """An int32 as int8; a device takes its lowest byte."""
    if not -128 <= value <= 127:
        raise ValueError(f"{value} is no int8")
    return np.int8(value)


# The work-group of the running item, each item in a thread of its own; `runtime.compile.simulate` sets it.
current = threading.local()

# Words of memory that the items of a work-group share.
LOCAL_WORDS = 512


def put_local(index, bits):
    """Put an int32 into the work-group's memory."""
    current.group.put(index, bits)


def get_local(index):
    """Get an int32 from the work-group's memory."""
    return current.group.get(index)


def barrier():
    """Wait until every item of the work-group is here; its memory is then the same for all."""
    current.group.barrier()


def group_larger(bits):
    """The largest int32 that any item of the work-group brings."""
    return current.group.larger(bits)
