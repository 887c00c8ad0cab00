"""Functions that are plain Python here and a few instructions of SPIR-V in a compiled kernel.

`runtime.compile.lowering` holds the compiled side of each. Import them by name: a kernel is compiled
with the functions that its names stand for.
"""

import threading

import numpy as np


def intrinsic(function, together=False):
    """Mark a function that `lowering` compiles; `together` if the items of a work-group meet in it."""
    function.intrinsic, function.together = True, together
    return function


def meeting(function):
    """Mark an intrinsic that only items which run at the same time can execute."""
    return intrinsic(function, together=True)


@intrinsic
def float_bits(x):
    """Bits of a float32, as int32."""
    return np.float32(x).view(np.int32)


@intrinsic
def float_from_bits(bits):
    """The float32 that has the bits of an int32."""
    return np.int32(bits).view(np.float32)


@intrinsic
def abs_bits(x):
    """Bits of ``|x|``, which order as ``|x|`` does, with infinity and then NaN above all numbers."""
    return np.int32(np.float32(x).view(np.int32) & 0x7FFFFFFF)


@intrinsic
def max_i32(a, b):
    """The larger of two int32."""
    return np.int32(max(a, b))


@intrinsic
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


@intrinsic
def divide(x, y):
    """``x / y`` in float32, which a device may get wrong by 2.5 units in the last place."""
    with np.errstate(all="ignore"):
        return np.float32(x) / np.float32(y)


@intrinsic
def rint_i32(x):
    """The int32 nearest to a float32 below 2**22, ties to even; for NaN and larger ones, some int32."""
    whole = np.rint(np.float32(x))
    return np.int32(whole) if abs(whole) < 2**22 else np.int32(2**22)


@intrinsic
def clamp(x, limit):
    """A float32 limited to ``[-limit, limit]``; NaN gives ``-limit``."""
    above = x if x >= -limit else -limit
    return np.float32(min(above, limit))


@intrinsic
def to_int8(value):
    """An int32 as int8; a device takes its lowest byte."""
    if not -128 <= value <= 127:
        raise ValueError(f"{value} does not fit in int8")
    return np.int8(value)


@intrinsic
def float_from_int8(code):
    """An int8 as float32."""
    return np.float32(code)


# The work-group of the running item, each item in a thread of its own; `runtime.compile.simulate` sets it.
current = threading.local()

# int32 words of local memory of a work-group.
LOCAL_WORDS = 512


@meeting
def put_local(index, bits):
    """Store an int32 in the local memory of the work-group."""
    if not 0 <= index < LOCAL_WORDS:
        raise IndexError(f"index {index} lies outside of the {LOCAL_WORDS} words of a work-group")
    current.group.put(index, bits)


@meeting
def get_local(index):
    """Load an int32 from the local memory of the work-group."""
    return current.group.get(index)


@meeting
def barrier():
    """Wait for every item of the work-group; what they stored in local memory is then visible to all."""
    current.group.barrier()


@meeting
def group_max(bits):
    """The largest int32 that the items of the work-group pass."""
    return current.group.max(bits)


@meeting
def lanes_sum(x):
    """The sum of the float32 that the lanes of the work-group pass, in an order that the device chooses.

    This, `lanes_max` and `from_lane` are for work-groups of 16 items that are one sub-group.
    """
    return np.float32(sum(current.group.exchange(np.float64(x))))


@meeting
def lanes_max(x):
    """The largest of the float32 or int32 that the lanes of the work-group pass, none of which may be NaN."""
    return max(current.group.exchange(x))


@meeting
def from_lane(x, lane):
    """What a lane of the work-group passes, a float32 or an int32; all pass the same `lane`."""
    return current.group.exchange(x)[int(lane)]
