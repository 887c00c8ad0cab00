"""Short vectors: tuples of values, unrolled when a kernel is compiled."""

from .intrinsics import intrinsic


@intrinsic
def each(function, values, *others):
    """``(function(values[0], *others), function(values[1], *others), ...)``."""
    return tuple(function(value, *others) for value in values)


@intrinsic
def run_through(function, start, first, second):
    """``function(function(start, first[0], second[0]), first[1], second[1])`` and so on."""
    for a, b in zip(first, second):
        start = function(start, a, b)
    return start


@intrinsic
def fold(function, values):
    """All values combined by an associative function of two, such as the largest of them."""
    if len(values) == 1:
        return values[0]
    middle = len(values) // 2
    return function(fold(function, values[:middle]), fold(function, values[middle:]))


@intrinsic
def each_pair(function, first, second, *others):
    """``(function(first[0], second[0], *others), function(first[1], second[1], *others), ...)``."""
    return tuple(function(a, b, *others) for a, b in zip(first, second))
