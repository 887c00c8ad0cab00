"""KernelError: what is wrong with a kernel, in one line, and where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable

from . import parameters

_SPACE = re.compile(r"(nd)?item\[[123]\]")
_ELEMENT = re.compile(r"u?int(8|16|32|64)|float(16|32|64)|bfloat16|float8_e4m3fn|float8_e5m2|\d+")
EXAMPLES = "'float32*' for a pointer, 'float32[token, head]' for a view, 'int64' for a number"


class KernelError(Exception):
    """A kernel cannot be compiled as it is written."""


def require_types(function: Callable, types: dict[str, str]) -> None:
    """Raise where an argument has no type, or one that is not known once type variables are replaced."""
    code = function.__code__
    annotations = function.__annotations__
    names = code.co_varnames[: code.co_argcount]
    for at, name in enumerate(names):
        wanted = EXAMPLES if at else "'item[1]', or 'nditem[1]' where it asks for its work-group"
        text = annotations.get(name)
        if not isinstance(text, str):
            raise _at(function, code.co_firstlineno, f"annotate `{name}` with its type, such as {wanted}")
        if not at:
            if not _SPACE.fullmatch(text):
                raise _at(function, code.co_firstlineno, f"`{name}` must be {wanted}, got {text!r}")
            continue
        element = parameters.parse(parameters.bind(text, types)).element
        if not _ELEMENT.fullmatch(element):
            message = (
                f"`{name}` has the type {text!r}, and {element!r} is no type; if it is a type variable, "
                f'choose it with {element}="float32"'
            )
            raise _at(function, code.co_firstlineno, message)


def of_compiler(function: Callable, error: Exception) -> KernelError:
    """numba's error as its innermost reason and the line of the kernel where it arose."""
    text = str(error).rpartition("specific error:")[2].partition("\n  raised from")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    reason = next((line for line in lines if "Failed in" not in line), lines[0])
    file = re.escape(Path(function.__code__.co_filename).name)
    found = re.search(rf'{file}"?(?:, line | \()(\d+)', text)
    return _at(function, int(found[1]) if found else function.__code__.co_firstlineno, reason)


def _at(function: Callable, line: int, message: str) -> KernelError:
    file = Path(function.__code__.co_filename).name
    return KernelError(f"{file}, line {line}, kernel {function.__name__}: {message}")
