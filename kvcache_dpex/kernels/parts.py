"""Rows cut into equal parts, none of them short: a CPU vectorizes what needs no guard at the end of a row."""


def start_of(part, width, size):
    """Where part `part` of a row of `size` begins: the last one ends with the row and overlaps those before.

    What two items then write to one place is the same twice. `width` is at most `size`.
    """
    return min(part * width, size - width)


def index_in_row(item, size):
    """Which element of a row is this item's, where work-groups along axis 0 are its parts."""
    part = item.get_group().get_group_id(0)
    return start_of(part, item.get_local_range(0), size) + item.get_local_id(0)
