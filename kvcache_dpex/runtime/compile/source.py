"""What a kernel is made of: its own source, its helpers', and the constants that they use."""

from __future__ import annotations

import ast
import functools
import inspect
import threading
from types import CodeType, FunctionType, ModuleType
from typing import Any, Callable

_PACKAGE = __name__.split(".runtime")[0]


def functions(function: Callable) -> tuple[Callable, ...]:
    """The functions of the package that a kernel calls, directly or through one another."""
    found: dict[Callable, None] = {}
    for _, value in _uses(function):
        for used in _functions_in(value):
            if used is not function and used not in found:
                found.update(dict.fromkeys((*functions(used), used)))
    return tuple(found)


def helpers(function: Callable) -> tuple[Callable, ...]:
    """Those of `functions` that are compiled from their Python."""
    return tuple(used for used in functions(function) if not getattr(used, "intrinsic", False))


def _functions_in(value: Any) -> list[FunctionType]:
    """A function itself; of a table of modules, such as one of codecs, what they define."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, dict):
        return [each for module in value.values() for each in _functions_in(module)]
    if isinstance(value, ModuleType) and value.__name__.startswith(f"{_PACKAGE}.kernels."):
        return [each for each in vars(value).values() if isinstance(each, FunctionType)]
    return []


def texts(function: Callable) -> list[str]:
    """Source of a function and of those that it calls, and every constant that they use."""
    found = []
    for part in (function, *functions(function)):
        found.append(inspect.getsource(part))
        for name, value in _uses(part):
            if isinstance(value, dict):
                found.append(f"{name} = {sorted(value)}")
            elif not isinstance(value, (FunctionType, ModuleType, threading.local)):
                found.append(f"{name} = {type(value).__name__}({value})")
    return found


def require_current(function: Callable) -> None:
    """Raise where a file was edited after its import: old host code would launch the new source's kernel."""
    for part in (function, *functions(function)):
        if not _is_current(part):
            raise RuntimeError(
                f"the source of {part.__name__} was edited after it was imported; start Python anew"
            )


def _is_current(function: Any) -> bool:
    """Whether the file of a function still holds it, to the bytecode."""
    try:
        # The whole file: what it imports decides how its functions call a method.
        file = _compiled("".join(inspect.findsource(function)[0]))
    except (OSError, SyntaxError):
        return False
    return _holds(file, _meaning(function.__code__))


@functools.cache
def _compiled(text: str) -> CodeType:
    return compile(text, "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _holds(code: CodeType, meaning: tuple) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return any(_meaning(each) == meaning or _holds(each, meaning) for each in inner)


def _meaning(code: CodeType) -> tuple:
    """What of a code object does not depend on where in a file it stands."""
    constants = tuple(
        _meaning(constant) if isinstance(constant, CodeType) else constant for constant in code.co_consts
    )
    return code.co_name, code.co_varnames, code.co_names, code.co_code, constants


def _uses(function: Callable) -> list[tuple[str, Any]]:
    """Name and value of everything global that a function uses, in order of name."""
    used = inspect.getclosurevars(function)
    return sorted({**used.globals, **used.nonlocals}.items())
