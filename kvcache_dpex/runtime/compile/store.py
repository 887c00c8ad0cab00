"""Where a kernel's SPIR-V comes from: packaged, else the user's cache, else compiled now.

SPIR-V is a cache of the Python source. A kernel's identity is a hash over its source, the helpers
and constants that it uses, its argument types, how it takes them and the compiler's version;
whatever changes one of them gives another identity, so a stale module is never found. Where the
package comes without its source (``.pyc`` files alone), nothing can be edited, and a packaged module
is taken by its name.

Compiled by numba-dpex in this process, or in another Python: the one that ``KVCACHE_DPEX_COMPILER``
names, else the one that ``python -m kvcache_dpex kernels compiler`` has installed.
``KVCACHE_DPEX_CACHE`` names another cache folder; ``KVCACHE_DPEX_KERNELS=compile`` skips what is
packaged and cached.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, Callable, NamedTuple

from . import cache, compiler, edits, elsewhere, errors, parameters, source, spirv
from .cache import cache_folder as cache_folder

PACKAGED = Path(__file__).parents[2] / "spirv"
MANIFEST = "manifest.json"
REINSTALL = "pip install --force-reinstall --no-deps kvcache_dpex"
NO_SOURCE = "kvcache_dpex is here without its source: reinstall it with its .py files"
_loading = threading.RLock()
_loaded: dict[tuple, Module] = edits.cache()


class Module(NamedTuple):
    """A kernel in SPIR-V, for one choice of argument types."""

    name: str
    identity: str
    parameters: tuple[str, ...]  # of the Python function
    arguments: tuple[str, ...]  # of the entry point
    index_space: str
    in_record: bool
    binary: bytes
    origin: str

    def __repr__(self) -> str:
        return (
            f"<kernel {self.name}: {len(self.binary)} bytes of SPIR-V, {self.origin}, "
            f"capabilities {', '.join(spirv.capabilities(self.binary))}>"
        )


class Signature(NamedTuple):
    """What identifies a module before it exists."""

    name: str
    identity: str
    parameters: tuple[str, ...]  # of the Python function
    arguments: tuple[str, ...]  # of the entry point
    index_space: str
    in_record: bool


def load(function: Callable, **types: str) -> Module:
    """The module of `function` for a choice of its type variables.

    Parameters
    ----------
    function
        A kernel as the `kernels` folder describes them.
    **types
        One value for each type variable of its annotations, such as ``word="uint64"``.

    Raises
    ------
    ImportError
        The kernel is neither packaged nor cached, and there is no numba-dpex to compile it.
    RuntimeError
        A file of the kernel was edited after it was imported, a packaged file is damaged, or the
        Python that compiles failed.

    Examples
    --------
    >>> from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
    >>> load(scatter_gpu, slot="int64").name
    'scatter_gpu-int64'
    """
    key = (function, *types.items())
    with _loading:
        if key not in _loaded:
            try:
                _loaded[key] = _find(source.current(function), types)
            except errors.KernelError as error:
                raise error.with_traceback(None) from None  # our frames tell its author nothing
        return _loaded[key]


def _find(function: Callable, types: dict[str, str]) -> Module:
    source.require_current(function)
    wanted = signature(function, **types)
    if os.environ.get("KVCACHE_DPEX_KERNELS") == "compile":
        return _compiled(function, wanted)
    found = packaged(wanted) or _cached(wanted)
    if found is None:
        with cache.lock():
            found = _cached(wanted) or _compiled(function, wanted)  # another process may have been faster
    return found


def _compiled(function: Callable, wanted: Signature) -> Module:
    binary = compile_signature(function, wanted)
    cache.write(wanted.name, wanted.identity, binary)
    return Module(*wanted, binary, "compiled")


def _cached(wanted: Signature) -> Module | None:
    binary = cache.read(wanted.name, wanted.identity)
    return None if binary is None else Module(*wanted, binary, "cache")


def signature(function: Callable, **types: str) -> Signature:
    """Name, identity and argument types of a kernel for a choice of its type variables."""
    errors.require_types(function, types)
    index_space, *annotations = function.__annotations__.values()
    bound = tuple(parameters.bind(text, types) for text in annotations)
    in_record = function.__globals__.get("IN_RECORD", False)
    name = "-".join((function.__name__, *map(str, types.values())))
    try:
        known = identity(function, index_space, bound, in_record)
    except OSError:  # no source beside the code, so that nobody can have edited it
        known = manifest()["modules"].get(name, {}).get("identity", "")
    return Signature(name, known, bound, parameters.flattened(bound), index_space, in_record)


def identity(function: Callable, index_space: str, bound: tuple[str, ...], in_record: bool) -> str:
    """Hash over everything that a kernel's SPIR-V depends on; OSError where the source is not there."""
    parts = compiler.fingerprint(), index_space, *bound, str(in_record), *source.texts(function)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def compile_signature(function: Callable, wanted: Signature) -> bytes:
    """Compile, here or in another Python, and tell a person at a terminal what takes the time."""
    if not edits.text(function):
        raise ImportError(f"kernel {wanted.name} cannot be compiled, since {NO_SOURCE}")
    python = elsewhere.named()
    if python is None and compiler.available():
        # numba keeps what it compiled of a module that was imported again; a fresh process does not.
        python = sys.executable if source.is_reimported(function) else None
    elif python is None:
        python = elsewhere.installed()
        if python is None:
            raise ImportError(
                f"kernel {wanted.name} is not in the package with this source and these types, and compiling "
                f"it needs numba-dpex: {elsewhere.REMEDY}"
            )
    if sys.stderr.isatty():
        print(f"compiling kernel {wanted.name}", file=sys.stderr)
    return (
        compile_here(function, wanted)
        if python is None
        else elsewhere.compile_kernel(python, function, wanted)
    )


def compile_here(function: Callable, wanted: Signature) -> bytes:
    """Compile in this process; needs numba-dpex."""
    entry = wanted.name.replace("-", "_")
    helpers = source.helpers(function)
    try:
        return compiler.compile_kernel(
            function, wanted.index_space, wanted.parameters, entry, helpers, wanted.in_record
        )
    except Exception as error:
        if type(error).__module__ != "numba.core.errors":
            raise
        raise errors.of_compiler(function, error) from None


def packaged(wanted: Signature) -> Module | None:
    """The packaged module of exactly this identity, else None."""
    entry = manifest()["modules"].get(wanted.name)
    if entry is None or entry["identity"] != wanted.identity:
        return None
    try:
        binary = _read(f"{wanted.name}.spv")
    except OSError as error:
        raise _damaged(f"{wanted.name}.spv", error) from error
    if hashlib.sha256(binary).hexdigest() != entry["sha256"]:
        raise _damaged(f"{wanted.name}.spv", "its SHA-256 differs from the manifest")
    return Module(*wanted, binary, "packaged")


def _damaged(file: str, reason: object) -> RuntimeError:
    return RuntimeError(f"{file} of the package is damaged ({reason}); reinstall: {REINSTALL}")


@functools.cache
def manifest() -> dict:
    """The list of packaged modules."""
    try:
        return json.loads(_read(MANIFEST))
    except FileNotFoundError:
        return {"modules": {}}
    except (OSError, ValueError) as error:
        raise _damaged(MANIFEST, error) from error


def _read(name: str) -> bytes:
    """A packaged file, through the loader, since the package may be a zip file."""
    loader: Any = __spec__.loader
    return loader.get_data(str(PACKAGED / name))
