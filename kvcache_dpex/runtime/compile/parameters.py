"""What the annotations of a kernel say: the types of its arguments, and how a launch passes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

_GRAMMAR = re.compile(r"(?P<element>\w+)(?P<star>\*(?P<width>\w*))?(\[(?P<axes>[^\]]*)\])?")
_BYTES = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


class Parameter(NamedTuple):
    """An argument of a kernel: a view, a pointer, a number, or a constant of the compilation.

    ``"float32*4[token, part=1]"`` is a view of vectors of four float32 with two axes, whose stride along
    the last is fixed at one vector; ``"uint64*"`` a pointer, ``"int64"`` a number, ``"128"`` a constant.
    """

    kind: str  # "view", "pointer", "number" or "constant"
    element: str
    width: int = 1
    axes: tuple[str, ...] = ()
    contiguous: bool = False  # along the last axis

    @property
    def num_strides(self) -> int:
        """How many strides are passed with the pointer."""
        return len(self.axes) - self.contiguous

    @property
    def unit(self) -> int:
        """Bytes of an element, which strides count."""
        return self.width * (_BYTES.get(self.element) or int(re.sub(r"\D", "", self.element)) // 8)


def bind(annotation: str, types: Mapping[str, Any]) -> str:
    """An annotation with its type variables replaced.

    >>> bind("value*width[token, part=step]", {"value": "float16", "width": 8, "step": "1"})
    'float16*8[token, part=1]'
    """
    kind, bracket, axes = annotation.partition("[")

    def value(match: re.Match) -> str:
        return str(types.get(match[0], match[0]))

    return re.sub(r"\w+", value, kind) + bracket + re.sub(r"(?<==)\w+", value, axes)


def parse(text: str) -> Parameter:
    """What a bound annotation says.

    >>> parse("float16*8[token, part=1]").num_strides
    1
    """
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise ValueError(f"an argument's type must look like 'float32*4[token, part=1]', got {text!r}")
    element = match["element"]
    if match["axes"] is None:
        if element.isdigit():
            return Parameter("constant", element)
        return Parameter("pointer" if match["star"] else "number", element)
    names, _, steps = zip(*(axis.strip().partition("=") for axis in match["axes"].split(",")))
    if not all(names):
        raise ValueError(f"each axis of a view needs a name, got {text!r}")
    if any(step not in ("", "any") for step in steps[:-1]) or steps[-1] not in ("", "any", "1"):
        raise ValueError(f"only the stride of the last axis may be fixed, and only at 1, got {text!r}")
    return Parameter("view", element, int(match["width"] or 1), names, steps[-1] == "1")


def flattened(texts: Sequence[str]) -> tuple[str, ...]:
    """The types of the arguments as a launch passes them: all pointers, then all numbers.

    >>> flattened(["float16*8[token, part=1]", "int64"])
    ('float16*', 'int64', 'int64')
    """
    parameters = [parse(text) for text in texts]
    pointers = [f"{each.element}*" for each in parameters if each.kind in ("view", "pointer")]
    numbers: list[str] = []
    for each in parameters:
        numbers += [each.element] if each.kind == "number" else ["int64"] * each.num_strides
    return (*pointers, *numbers)


def grouped(texts: Sequence[str], pointers: Sequence[Any], numbers: Sequence[Any], view: Callable) -> list:
    """A kernel's arguments out of those of `flattened`; ``view(parameter, pointer, strides)`` makes views."""
    rest, pointers_left = list(numbers), list(pointers)
    arguments: list[Any] = []
    for each in map(parse, texts):
        if each.kind == "view":
            strides = [rest.pop(0) for _ in range(each.num_strides)]
            arguments.append(view(each, pointers_left.pop(0), strides))
        elif each.kind == "constant":
            arguments.append(int(each.element))
        else:
            arguments.append((pointers_left if each.kind == "pointer" else rest).pop(0))
    return arguments
