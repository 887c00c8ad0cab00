"""From operands to a plan: a kernel's views of them, and the choice among the kernels of an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from ..runtime.compile import parameters
from ..runtime.launch.arrays import Operand
from . import calls
from .calls import Plan, Steps
from .groups import CPU_VECTOR


class Variant(NamedTuple):
    """A kernel of an operation, when to take it, and how its launch is made of the operands."""

    kernel: Callable
    suits: Callable[..., bool]  # of the device, the type of the values and the head size
    plan: Callable[..., Plan | Steps | None]  # of the kernel and the operands; None if they do not fit


def anywhere(device: Any, value_type: str | None = None, head_size: int | None = None) -> bool:
    return True


def across_items(device: Any, value_type: str | None = None, head_size: int | None = None) -> bool:
    """Whether neighbouring items should take neighbouring values.

    A CPU makes one vector of them. It converts float16 only between neighbours of one item.
    """
    return device.is_cpu and value_type != "float16"


def within_items(device: Any, value_type: str | None = None, head_size: int | None = None) -> bool:
    return not across_items(device, value_type)


def fills_vectors(device: Any, head_size: int, per_item: int) -> bool:
    """Whether items that take `per_item` values of a head are whole vectors of a CPU."""
    return not device.is_cpu or head_size % (CPU_VECTOR * per_item) == 0


def choose(
    variants: Sequence[Variant], device: Any, value_type: str | None, head_size: int | None, *operands: Any
) -> Any:
    """The plan of the first variant that suits and fits; the last one fits always."""
    *special, last = variants
    wanted = calls.settings.variant
    if wanted is None:
        special = [each for each in special if each.suits(device, value_type, head_size)]
    else:
        special = [each for each in special if each.kernel.__name__ == wanted]
    for variant in (*special, last):
        found = variant.plan(variant.kernel, *operands)
        if found is not None:
            return found
    raise AssertionError(f"no kernel fits, not even {last.kernel.__name__}")


def plan_of(
    kernel: Callable,
    types: dict[str, str],
    groups: tuple[tuple[int, ...], tuple[int, ...]],
    alignment: int,
    **arguments: Any,
) -> Plan | None:
    """The launch of a kernel on operands and numbers, named as its parameters.

    None where the kernel has no such types, or a view does not fit.

    Parameters
    ----------
    types
        A value for each type variable of the kernel.
    groups
        Global and local size.
    alignment
        Bytes that the addresses of all operands are multiples of, up to 16.
    **arguments
        An `Operand` for each view, or None for one that is not read; an int for each number.
    """
    known = kernel.__globals__.get("TYPES", {})
    if any(value not in known.get(name, (value,)) for name, value in types.items()):
        return None
    numbers: list[int] = []
    _, *annotations = kernel.__annotations__.items()
    for name, text in annotations:
        parameter = parameters.parse(parameters.bind(text, types))
        given = arguments[name]
        if parameter.kind == "number":
            numbers.append(given)
            continue
        strides = _strides(parameter, given, alignment)
        if strides is None:
            return None
        numbers += strides
    queue = next(each.queue for each in arguments.values() if isinstance(each, Operand))
    return Plan(kernel, types, queue, tuple(numbers), *groups)


def _strides(
    parameter: parameters.Parameter, operand: Operand | None, alignment: int
) -> tuple[int, ...] | None:
    """The strides that a view of an operand takes, in its own units; None if there is no such view."""
    if operand is None:
        return (0,) * parameter.num_strides
    if parameter.contiguous:
        if alignment % min(parameter.unit, 16):
            return None
        operand = in_units(operand, parameter.unit)
    return None if operand is None else operand.strides[: parameter.num_strides]


def in_units(operand: Operand, unit: int) -> Operand | None:
    """The operand with `unit` bytes of its last axis as one element; None where they are not neighbours."""
    per_unit = unit // operand.itemsize
    *outer, last = operand.strides
    if last != 1 or operand.shape[-1] % per_unit or any(stride % per_unit for stride in outer):
        return None
    shape = (*operand.shape[:-1], operand.shape[-1] // per_unit)
    strides = (*(stride // per_unit for stride in outer), 1)
    return operand._replace(shape=shape, strides=strides, dtype=np.dtype(f"V{unit}"))


def merged(operand: Operand | None, axis: int) -> Operand | None:
    """The operand with an axis and the next one as one; None where their elements are not evenly spaced."""
    if operand is None:
        return None
    (outer, inner), (outer_stride, inner_stride) = operand.shape[axis:][:2], operand.strides[axis:][:2]
    if inner == 1:
        inner_stride = outer_stride
    elif outer != 1 and outer_stride != inner * inner_stride:
        return None
    shape = (*operand.shape[:axis], outer * inner, *operand.shape[axis + 2 :])
    strides = (*operand.strides[:axis], inner_stride, *operand.strides[axis + 2 :])
    return operand._replace(shape=shape, strides=strides)
