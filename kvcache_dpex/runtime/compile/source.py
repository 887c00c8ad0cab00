"""What a kernel is made of: its own source, its helpers', and the constants that they use."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import threading
from types import FunctionType, ModuleType
from typing import Any, Callable

from . import edits

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
    """Source of a function and of those that it calls, and every constant that they use.

    Raises OSError where the source is not there, as beside ``.pyc`` files alone.
    """
    found = []
    for part in (function, *functions(function)):
        found.append(_block(part))
        for name, value in _uses(part):
            if isinstance(value, dict):
                found.append(f"{name} = {_table(value)}")
            elif not isinstance(value, (FunctionType, ModuleType, threading.local)):
                found.append(f"{name} = {_text_of(value)}")
    return found


def _table(table: dict) -> list[tuple[str, str]]:
    """Which function or module each key of a table names, whatever the package is called."""
    return sorted((key, each.__name__.rpartition(".")[2]) for key, each in table.items())


def _text_of(constant: Any) -> str:
    """A constant with its type, the same under every release of NumPy."""
    if isinstance(constant, tuple):
        return f"tuple({', '.join(map(_text_of, constant))})"
    return f"{type(constant).__name__}({constant})"


def current(function: Callable) -> Callable:
    """The kernel of this name in its module as it is now; importers hold the old one after a reload."""
    if not function.__module__.startswith(f"{_PACKAGE}.kernels."):
        return function
    return getattr(sys.modules.get(function.__module__), function.__name__, function)


def require_current(function: Callable) -> None:
    """Raise where the code in memory is not that of the files, which the next process would compile."""
    for part in _parts(function):
        if edits.is_edited(part):
            raise RuntimeError(
                f"{edits.file(part)} was edited after it was imported: restart Python, or import it again "
                "with importlib.reload"
            )
        if _is_replaced(part):
            raise RuntimeError(
                f"{function.__name__} uses {part.__name__} of {part.__module__} as it was before that was "
                f"imported again: import {function.__module__} again too, or restart Python"
            )


def is_reimported(function: Callable) -> bool:
    """Whether a part of the kernel was imported again, so that numba may hold what it compiled before."""
    return any(part.__module__ in edits.reimported for part in _parts(function))


def _parts(function: Callable) -> tuple[Callable, ...]:
    return function, *functions(function)


def _is_replaced(function: Callable) -> bool:
    module = sys.modules.get(function.__module__)
    if function.__module__ not in edits.reimported or "<locals>" in function.__qualname__:
        return False
    return getattr(getattr(module, function.__name__, None), "__code__", None) is not function.__code__


def _block(function: Any) -> str:
    """The lines of a function in its file as it was imported."""
    text, line = edits.text(function), function.__code__.co_firstlineno
    if not text:
        raise OSError(f"the source of {function.__name__} is not there")
    named = [node for node in _functions(text, edits.file(function)) if node.name == function.__name__]
    if not named:
        raise RuntimeError(f"{edits.file(function)} does not define {function.__name__}")
    nearest = min(named, key=lambda node: abs(node.lineno - line))
    return "\n".join(text.splitlines()[nearest.lineno - 1 : nearest.end_lineno])


@functools.cache
def _functions(text: str, file: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(text, file)) if isinstance(node, ast.FunctionDef)]


def _uses(function: Callable) -> list[tuple[str, Any]]:
    """Name and value of everything global that a function uses, in order of name."""
    used = inspect.getclosurevars(function)
    return sorted({**used.globals, **used.nonlocals}.items())
