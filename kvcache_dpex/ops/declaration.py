"""What the signature of an operation declares: arrays that are read, arrays that are written, options."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Callable, NamedTuple, Union, get_args, get_origin, get_type_hints

Array = Annotated[Any, "read"]
"""A dpnp array, usm_ndarray or torch.Tensor that is read."""
Written = Annotated[Any, "written"]
"""An array that is changed in place."""
Name = Annotated[Any, "str"]
"""A name, or None."""
DType = Annotated[Any, "ScalarType"]
"""A dtype or its name."""
Float = Annotated[Any, "float"]
"""A float or None."""
Int = Annotated[Any, "int"]
"""An int or None."""


class Parameter(NamedTuple):
    """One argument of an operation."""

    name: str
    kind: str  # "read" or "written" for arrays, else the type of an option as torch's schemas name it
    optional: bool
    default: Any

    @property
    def is_array(self) -> bool:
        return self.kind in ("read", "written")


def parameters_of(function: Callable) -> tuple[Parameter, ...]:
    """The parameters of a declaration, with the kinds that its annotations name."""
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        optional = parameter.default is not inspect.Parameter.empty
        hint = _without_none(hints[name])
        (kind,) = getattr(hint, "__metadata__", (str(getattr(hint, "__name__", "")),))
        found.append(Parameter(name, kind, optional, parameter.default if optional else None))
    return tuple(found)


def _without_none(hint: Any) -> Any:
    """Before 3.11, Python adds None to the hint of a parameter whose default is None."""
    return get_args(hint)[0] if get_origin(hint) is Union else hint
