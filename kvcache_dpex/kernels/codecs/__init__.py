"""Codecs: how a row of values becomes codes with a scale, and values again; one file for each format.

A codec defines, for rows of any kernel:

* ``scale_of(absmax)``: the row's scale, from the bits of its largest magnitude;
* ``codes_of(x, absmax, scale)``: the codes of some of the row's values;
* ``value_of(code, scale)``: a code's value, as float32.
"""

from ..intrinsics import intrinsic
from . import e4m3, int8

# By the element type of the codes.
CODECS = {"int8": int8, "float8_e4m3fn": e4m3}


@intrinsic
def codec_of(codes):
    """The codec of a view of codes, chosen by its element type when a kernel is compiled."""
    return CODECS[codes.element]
