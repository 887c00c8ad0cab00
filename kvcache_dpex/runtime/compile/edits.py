"""Remembers each kernel file as it was imported, and empties caches when a module is imported again.

Python runs the code that it imported; an edit takes effect when the module is imported again: in the
next process, by ``importlib.reload`` or, in Jupyter, in the next cell, for which edited kernels are
reloaded here. A kernel's identity is a hash over the text of the code that runs, so the text is read
together with the import, and a file that differs from it by now is noticed (`is_edited`).
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import FunctionType, ModuleType
from typing import Any, Callable

_KERNELS = __name__.split(".runtime")[0] + ".kernels."
_at_import: dict[str, str] = {}  # text of a kernel file, by the name of its module
_texts: dict[int | str, tuple[Any, str]] = {}  # spec and text, by the spec's id; by file name without a spec
_callbacks: list[Callable[[], None]] = []
reimported: set[str] = set()  # names of the modules that were imported again in this process


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing; reads a kernel file just before somebody else finds and imports it."""

    def find_spec(self, fullname, path=None, target=None):
        is_kernel = fullname.startswith(_KERNELS) and (target is not None or fullname not in sys.modules)
        if target is not None or (is_kernel and fullname in _at_import):
            reimported.add(fullname)
            forget()
        if is_kernel:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            _at_import[fullname] = "" if spec is None else _source(spec)
        return


def watch() -> None:
    """Watch imports from now on and, in Jupyter, the kernel files before each cell."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.events.register("pre_run_cell", _before_cell)


def cache() -> dict:
    """A dict that is emptied when a module is imported again: for whatever is made from kernels."""
    made: dict = {}
    on_edit(made.clear)
    return made


def on_edit(callback: Callable[[], None]) -> None:
    """Call `callback` whenever what was made from kernels must be made anew."""
    _callbacks.append(callback)


def forget() -> None:
    """Empty every dict of `cache`, and whatever else was asked for with `on_edit`."""
    for callback in _callbacks:
        callback()


def text(part: Any) -> str:
    """Text of the file of a function or module, as it was imported; empty where there is no source.

    A file outside the `kernels` folder is read when it is first asked for.
    """
    spec = _spec(part)
    key = file(part) if spec is None else id(spec)
    if key not in _texts:
        known = None if spec is None else _at_import.get(spec.name)
        _texts[key] = spec, _text_now(part) if known is None else known
    return _texts[key][1]


def is_edited(part: Any) -> bool:
    """Whether the file of a function or module differs from what was imported."""
    return text(part) != _text_now(part)


def file(part: Any) -> str:
    """Path of the file of a function or module."""
    spec = _spec(part)
    if spec is not None and spec.origin is not None:
        return spec.origin
    return part.__code__.co_filename if isinstance(part, FunctionType) else part.__file__


def _before_cell(*_: object) -> None:
    """Reload the kernel files if one was edited, whether or not %autoreload is on.

    All of them, each after those that it imports: %autoreload may have patched some functions in place.
    """
    modules = {name: each for name, each in list(sys.modules.items()) if name.startswith(_KERNELS)}
    if any(is_edited(module) for module in modules.values()):
        from graphlib import TopologicalSorter

        forget()
        imports = {name: _imports(module) & modules.keys() for name, module in modules.items()}
        for name in TopologicalSorter(imports).static_order():
            importlib.reload(modules[name])


def _imports(module: ModuleType) -> set[str]:
    """Names of whatever a file imports relatively; some may be those of functions."""
    found = set()
    for node in ast.walk(ast.parse(_text_now(module), file(module))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__)
            found |= {base, *(f"{base}.{each.name}" for each in node.names)}
    return found


def _text_now(part: Any) -> str:
    """Text of the file on disk; that of a notebook's cell never changes."""
    spec = _spec(part)
    if spec is not None and hasattr(spec.loader, "get_source"):
        return _source(spec)
    import linecache

    linecache.checkcache(file(part))
    return "".join(linecache.getlines(file(part)))


def _source(spec: importlib.machinery.ModuleSpec) -> str:
    try:
        return spec.loader.get_source(spec.name) or ""  # type: ignore[union-attr]
    except (ImportError, OSError, SyntaxError):
        return ""


def _spec(part: Any) -> importlib.machinery.ModuleSpec | None:
    return (vars(part) if isinstance(part, ModuleType) else part.__globals__).get("__spec__")
