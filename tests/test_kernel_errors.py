# ruff: noqa: F722, F821  (annotations are the kernel's argument types)
"""What a kernel's author is told: one line with the file, the line and the reason."""

import re
import traceback

import pytest

from kvcache_dpex.runtime.compile import compiler, store
from kvcache_dpex.runtime.compile.errors import KernelError


def no_item(item, data: "uint32*"):
    pass


def no_space(item: "uint32*", data: "uint32*"):
    pass


def no_type(item: "item[1]", data):
    pass


def type_variable(item: "item[1]", data: "word*"):
    data[item.get_id(0)] = 1


def unknown_name(item: "item[1]", data: "uint32*"):
    data[0] = 1
    data[item.get_id(0)] = undefined_name


def unknown_method(item: "item[1]", data: "uint32*"):
    i = item.get_idd(0)
    data[i] = 1


def text(item: "item[1]", data: "uint32*"):
    i = item.get_id(0)
    data[i] = "text"


UNTYPED = [
    (no_item, 0, "annotate `item` with its type, such as 'item[1]'"),
    (no_space, 0, "`item` must be 'item[1]', or 'nditem[1]' where it asks for its work-group, got 'uint32*'"),
    (no_type, 0, "annotate `data` with its type, such as 'float32*' for a pointer"),
    (type_variable, 0, "`data` has the type 'word*', and 'word' is no type; if it is a type variable"),
]
REFUSED = [
    (unknown_name, None, "NameError: name 'undefined_name' is not defined"),
    (unknown_method, 1, "Unknown attribute 'get_idd' of type Item<1>"),
    (text, 2, "Cannot cast Literal[str](text) to uint32"),
]


def assert_short(function, line, message):
    with pytest.raises(KernelError) as raised:
        store.load(function)
    first = function.__code__.co_firstlineno
    where = r"\d+" if line is None else str(first + line)
    start = rf"test_kernel_errors\.py, line {where}, kernel {function.__name__}: {re.escape(message)}"
    assert re.match(start, str(raised.value))
    shown = "".join(traceback.format_exception(KernelError, raised.value, raised.tb))
    assert shown.count("\n") < 15


@pytest.mark.parametrize("case", UNTYPED, ids=lambda case: case[0].__name__)
def test_types_are_asked_for_before_anything_is_compiled(case):
    assert_short(*case)


@pytest.mark.skipif(not compiler.available(), reason="compiling in this process needs numba-dpex")
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0].__name__)
def test_what_the_compiler_refuses(case):
    assert_short(*case)
