"""Arrays as blocks: the first axis counts them, and the others are ordered and merged."""

from __future__ import annotations

from ..runtime.launch.arrays import Operand


def blocks_of(name: str, operand: Operand, num_blocks: int | None) -> Operand:
    """An array of blocks, its first axis split where it counts slots."""
    if not operand.shape:
        raise ValueError(f"`{name}` must have shape [num_blocks, ...], got []")
    count = operand.shape[0]
    if num_blocks is None or num_blocks == count:
        return operand
    if num_blocks < 1 or count % num_blocks:
        raise ValueError(
            f"`{name}` must have a first axis of num_blocks or num_blocks * block_size, with num_blocks = "
            f"{num_blocks}, got shape {list(operand.shape)}"
        )
    rows, step = count // num_blocks, operand.strides[0]
    shape = (num_blocks, rows, *operand.shape[1:])
    return operand._replace(shape=shape, strides=(rows * step, step, *operand.strides[1:]))


def with_three_axes(given: dict[str, Operand]) -> dict[str, Operand]:
    """The arrays as ``[num_blocks, outer, row, element]``, their axes ordered and merged alike in all."""
    first = next(iter(given.values()))
    strides = {name: each.strides for name, each in given.items()}
    axes = [axis for axis, size in enumerate(first.shape) if axis and size > 1]
    axes.sort(key=lambda axis: -abs(first.strides[axis]))
    shape = [first.shape[axis] for axis in axes]
    steps = {name: [each[axis] for axis in axes] for name, each in strides.items()}
    at = len(shape) - 1
    while at > 0:
        if all(each[at - 1] == shape[at] * each[at] for each in steps.values()):
            shape[at - 1 : at + 1] = [shape[at - 1] * shape[at]]
            for each in steps.values():
                del each[at - 1]
        at -= 1
    if len(shape) > 3:
        raise ValueError(
            "`target_0` must have blocks of at most three axes of different spacing, got "
            f"{list(first.shape)} with strides {list(first.strides)}; copy it first"
        )
    missing = 3 - len(shape)
    return {
        name: each._replace(
            shape=(each.shape[0], *[1] * missing, *shape),
            strides=(each.strides[0], *[0] * (missing - (not shape)), *([] if shape else [1]), *steps[name]),
        )
        for name, each in given.items()
    }
