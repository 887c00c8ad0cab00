"""How items share a row: in equal parts, none of them short, so that no item needs a guard at its end."""

from .views import is_contiguous


def start_of(part, width, size):
    """Where part `part` of a row of `size` begins; the last part ends with the row and may overlap others.

    Items then store equal values in one place. `width` is at most `size`.
    """
    return min(part * width, size - width)


def index_in_row(item, size):
    """The element of a row that is this item's, where work-groups along axis 0 are the row's parts."""
    part = item.get_group().get_group_id(0)
    return start_of(part, item.get_local_range(0), size) + item.get_local_id(0)


def spread(number, first, step):
    """The `number`-th index of those that start at `first` and lie `step` apart."""
    return first + number * step


def own_lane(view, lane, size):
    """The lane's element in the first part of a row; of rows shorter than that, the last one.

    Rows of contiguous views are never shorter, and a CPU makes vectors of them.
    """
    return lane if is_contiguous(view) else min(lane, size - 1)
