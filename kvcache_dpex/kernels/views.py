"""Access to arrays by axis: a view is a pointer, an element type and a stride for each axis.

An argument's annotation declares it: ``"value*8[token, head, part=1]"`` has elements of eight neighbouring
values, a stride for `token` and one for `head`, both counted in eights, and neighbouring eights along `part`.
Where the last index is a tuple, elements are loaded or stored one for each entry.

float32, float16 and bfloat16 elements are float32 in a kernel; all others are what the memory holds.
"""

from .intrinsics import intrinsic


@intrinsic
def load(view, *index):
    """The element at an index, a tuple of values where the view's elements are vectors."""
    return view.load(index)


@intrinsic
def store(view, value, *index):
    """Store an element, float32 rounded to the view's type once, to nearest even."""
    view.store(value, index)


@intrinsic
def store_zero(view, *index):
    """Store an element whose bits are all zero."""
    view.store_zero(index)


@intrinsic
def row_from(view, *index):
    """A view of one axis: the last axis of `view`, from the element at an index on."""
    return view.row_from(index)


@intrinsic
def is_contiguous(view):
    """Whether the type of the view says that elements along the last axis are neighbours."""
    return view.contiguous
