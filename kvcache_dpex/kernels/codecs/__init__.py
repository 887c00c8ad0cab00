"""Codecs: how a row of values becomes codes with a scale, and values again; one file for each format.

A codec defines of these, for rows of any kernel, what its format has:

* ``scale_of(absmax)``: the row's scale, from the bits of its largest magnitude;
* ``codes_of(x, absmax, scale)``: the codes of some of the row's values;
* ``codes_by(x, scale)``: codes by a scale that is given, in place of these two;
* ``value_of(code, scale)``: a code's value, as float32;
* ``scale_at(scales, block, offset, head)``: the scale of a row of a cache.

The codec of values that are stored as they are, `plain`, has the last two alone.
"""

from ..intrinsics import intrinsic
from . import e4m3, e5m2, int8, plain

# By the element type of the codes.
CODECS = {
    "int8": int8,
    "float8_e4m3fn": e4m3,
    "float8_e5m2": e5m2,
    "float32": plain,
    "float16": plain,
    "bfloat16": plain,
}


@intrinsic
def codec_of(codes):
    """The codec of a view of codes, chosen by its element type when a kernel is compiled."""
    return CODECS[codes.element]
