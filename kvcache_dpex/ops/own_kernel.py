"""launch_kernel: a kernel of one's own, compiled and launched on arrays of the device."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Callable

from ..runtime.compile import edits, errors, parameters
from ..runtime.compile.parameters import Parameter
from ..runtime.launch import launch
from ..runtime.launch.arrays import Operand, read
from . import calls, validate
from .plan import plan_of

_LOCAL = 64  # items of a work-group where the kernel does not ask for its group
_prepared = launch.LaunchCache()
edits.on_edit(_prepared.clear)


def launch_kernel(
    kernel: Callable, global_size: Sequence[int], *arguments: Any, local_size: Any = None, **types: str
) -> None:
    """Launch a kernel that you wrote, compiling it first where that is needed.

    Indices are not checked on the device: run the kernel with `simulate` first, which checks each of them.

    Parameters
    ----------
    kernel
        A Python function whose annotations are the types of its arguments, the first of which is the item,
        as `kvcache_dpex.kernels` describes them.
    global_size
        Items along each axis, axis 0 (the fast one) first.
    *arguments
        An array or tensor for each pointer and view, an int for each number, in the kernel's order. All are
        on one queue; constants are left out. Pointers take contiguous arrays, views take any strides. An
        array's dtype must be as wide as the annotation says, for bits are moved as they are.
    local_size
        Items of a work-group along each axis; needed where the first argument is an ``nditem``.
    **types
        A value for each type variable of the annotations, such as ``word="uint32"``.

    Raises
    ------
    KernelError
        The kernel cannot be compiled as it is written; names the file and the line.
    ImportError
        It is not compiled yet, and nothing here can compile it.
    TypeError, ValueError
        An argument does not fit its annotation, or a size does not fit the kernel.

    Notes
    -----
    Ordered on the arrays' queue as every operation is; a GPU does not block the host. Arrays that overlap
    are not noticed.

    Examples
    --------
    >>> def double(item: "item[1]", data: "int32*"):
    ...     i = item.get_id(0)
    ...     data[i] = 2 * data[i]

    >>> import dpnp
    >>> data = dpnp.arange(4, dtype="int32")
    >>> launch_kernel(double, [4], data)  # doctest: +SKIP
    """
    __tracebackhide__ = True
    launch.refuse_after_fork()
    errors.require_types(kernel, types)
    (_, space), *annotations = kernel.__annotations__.items()
    wanted = {name: parameters.parse(parameters.bind(text, types)) for name, text in annotations}
    taken = [name for name, parameter in wanted.items() if parameter.kind != "constant"]
    if len(arguments) != len(taken):
        raise TypeError(
            f"{kernel.__name__} takes {len(taken)} arguments ({', '.join(taken)}), got {len(arguments)}"
        )
    groups = _groups(space, tuple(global_size), local_size)
    values: dict[str, Any] = dict.fromkeys(wanted)
    addresses, arrays = [], []
    for name, given in zip(taken, arguments):
        if wanted[name].kind == "number":
            values[name] = _number(name, wanted[name].element, given)
        else:
            address, fields = read(given, name)
            values[name] = _fitting(name, wanted[name], Operand(*fields))
            addresses.append(address)
            arrays.append(given)
    if 0 not in groups[0]:
        _launched(kernel, types, groups, addresses, values)(tuple(addresses), tuple(arrays))


def _launched(
    kernel: Callable, types: dict[str, str], groups: tuple, addresses: list[int], values: dict[str, Any]
) -> calls.Launched:
    """The launch for arrays of these kinds and these numbers, prepared once."""
    __tracebackhide__ = True
    operands = {name: value for name, value in values.items() if isinstance(value, Operand)}
    if not operands:
        raise ValueError(f"{kernel.__name__} takes no array, so that there is no queue to launch it on")
    validate.same_queue(**operands)
    bits = functools.reduce(operator.or_, addresses, 16)
    key = kernel, groups, *types.items(), *values.values(), bits & -bits
    found = _prepared.get(key)
    if found is None:
        plan = plan_of(kernel, types, groups, bits & -bits, **values)
        if plan is None:
            raise ValueError(
                f"the strides or the address of an array do not fit its view; the views of {kernel.__name__} "
                f"that end in =1 need a last axis without gaps and rows at multiples of their width"
            )
        found = calls.launch_of(plan)
        _prepared.add(key, plan.queue, found)
    return found


def _groups(space: str, global_size: tuple[int, ...], local_size: Any) -> tuple:
    """Global and local size, once they fit the kernel's item."""
    axes = int(space[-2])
    if len(global_size) != axes:
        raise ValueError(f"`global_size` must have {axes} axes as {space} has, got {list(global_size)}")
    if local_size is None:
        if space.startswith("nd"):
            raise ValueError("`local_size` must be given, since the kernel's nditem asks for its work-group")
        local_size = (math.gcd(global_size[0], _LOCAL), *(1,) * (axes - 1))
    local = tuple(local_size)
    if len(local) != axes or any(each < 1 or size % each for size, each in zip(global_size, local)):
        raise ValueError(
            f"`global_size` must be whole work-groups of {list(local)}, got {list(global_size)}; round it up "
            "and let the kernel skip the surplus items"
        )
    return global_size, local


def _number(name: str, element: str, given: Any) -> int:
    if element != "int64":
        raise TypeError(f"`{name}` must be annotated as int64, got {element}; pass others in an array")
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"`{name}` must be an int, got {given!r}") from None


def _fitting(name: str, parameter: Parameter, operand: Operand) -> Operand:
    """The operand, once its elements are as wide as the annotation says and lie as a view or pointer can."""
    width = parameter.unit // parameter.width
    if operand.itemsize != width:
        raise TypeError(
            f"`{name}` must have elements of {width} bytes ({parameter.element}), got {operand.dtype_name}"
        )
    if parameter.kind == "pointer" and not _is_contiguous(operand):
        raise ValueError(
            f"`{name}` is a pointer and must be contiguous, got shape {list(operand.shape)} with strides "
            f'{list(operand.strides)}; annotate it as a view, such as "{parameter.element}[token, element]"'
        )
    if parameter.kind == "view" and parameter.width == 1 and len(operand.shape) != len(parameter.axes):
        raise ValueError(
            f"`{name}` must have the axes {list(parameter.axes)}, got shape {list(operand.shape)}"
        )
    return operand


def _is_contiguous(operand: Operand) -> bool:
    step = 1
    for size, stride in zip(reversed(operand.shape), reversed(operand.strides)):
        if size != 1 and stride != step:
            return 0 in operand.shape
        step *= size
    return True
