"""Where a kernel's SPIR-V comes from: packaged, else the user's cache, else compiled now.

SPIR-V is a cache of the Python source. A kernel's identity is a hash over its source, the helpers
and constants that it uses, its argument types, how it takes them and the compiler's version;
whatever changes one of them gives another identity, so a stale module is never found.

``KVCACHE_DPEX_CACHE`` names another cache folder; ``KVCACHE_DPEX_KERNELS=compile`` skips what is
packaged and cached.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import sys
import tempfile
import threading
from importlib import import_module
from pathlib import Path
from typing import Callable, NamedTuple

from . import compiler, parameters, source, spirv

_PACKAGE = Path(__file__).parents[2]
_KERNELS = _PACKAGE / "kernels"
PACKAGED = _PACKAGE / "spirv"
MANIFEST = "manifest.json"
_compiling = threading.Lock()


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


@functools.cache
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
        The kernel is neither packaged nor cached, and numba-dpex is not installed.

    Examples
    --------
    >>> from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
    >>> load(scatter_gpu, slot="int64").name
    'scatter_gpu-int64'
    """
    source.require_current(function)
    wanted = signature(function, **types)
    if os.environ.get("KVCACHE_DPEX_KERNELS") != "compile":
        found = packaged(wanted) or _cached(wanted)
        if found is not None:
            return found
    if not compiler.available():
        raise ImportError(
            f"kernel {wanted.name} is not in the package with this source and these types, and compiling "
            "it needs numba-dpex: pip install 'kvcache_dpex[jit]' (Python 3.9 to 3.11)"
        )
    with _compiling:
        found = Module(*wanted, compile_signature(function, wanted), "compiled")
    _write_atomically(_cache_path(wanted), _sealed(found.binary))
    return found


def signature(function: Callable, **types: str) -> Signature:
    """Name, identity and argument types of a kernel for a choice of its type variables."""
    index_space, *annotations = function.__annotations__.values()
    bound = tuple(parameters.bind(text, types) for text in annotations)
    in_record = function.__globals__.get("IN_RECORD", False)
    parts = compiler.fingerprint(), index_space, *bound, str(in_record), *source.texts(function)
    identity = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    name = "-".join((function.__name__, *map(str, types.values())))
    return Signature(name, identity, bound, parameters.flattened(bound), index_space, in_record)


def compile_signature(function: Callable, wanted: Signature) -> bytes:
    """Compile, telling a person at a terminal what takes the time."""
    from rich.console import Console

    # A notebook's output is no terminal, whatever it claims, and rich would ask for widgets there.
    console = Console(stderr=True, force_jupyter=False, quiet="ipykernel" in sys.modules)
    with console.status(f"compiling kernel {wanted.name}"):
        return compiler.compile_kernel(
            function,
            wanted.index_space,
            wanted.parameters,
            wanted.name.replace("-", "_"),
            source.helpers(function),
            wanted.in_record,
        )


def packaged(wanted: Signature) -> Module | None:
    """The packaged module of exactly this identity, else None."""
    entry = manifest()["modules"].get(wanted.name)
    if entry is None or entry["identity"] != wanted.identity:
        return None
    try:
        binary = (PACKAGED / f"{wanted.name}.spv").read_bytes()
    except OSError as error:
        raise _damaged(f"{wanted.name}.spv", error) from error
    if hashlib.sha256(binary).hexdigest() != entry["sha256"]:
        raise _damaged(f"{wanted.name}.spv", "its SHA-256 differs from the manifest")
    return Module(*wanted, binary, "packaged")


def _damaged(file: str, reason: object) -> RuntimeError:
    return RuntimeError(
        f"{file} of the package is damaged ({reason}); "
        "reinstall: pip install --force-reinstall --no-deps kvcache_dpex"
    )


@functools.cache
def manifest() -> dict:
    """The list of packaged modules."""
    path = PACKAGED / MANIFEST
    try:
        return json.loads(path.read_text()) if path.exists() else {"modules": {}}
    except ValueError as error:
        raise _damaged(MANIFEST, error) from error


def catalogue() -> list[tuple[Callable, dict[str, str]]]:
    """Every kernel of the `kernels` folder with every choice of its type variables."""
    found = []
    for file in sorted(_KERNELS.glob("*.py")):
        module = import_module(f"...kernels.{file.stem}", __package__)
        choices = getattr(module, "TYPES", None)
        if choices is not None:
            function = getattr(module, file.stem)
            found += [
                (function, dict(zip(choices, values))) for values in itertools.product(*choices.values())
            ]
    return found


def build_package(progress: Callable = iter) -> list[Module]:
    """Compile the catalogue into the package and write its manifest; needs numba-dpex."""
    modules = []
    for function, choice in progress(catalogue()):
        wanted = signature(function, **choice)
        modules.append(Module(*wanted, compile_signature(function, wanted), "compiled"))
    for stale in PACKAGED.glob("*.spv"):
        stale.unlink()
    for module in modules:
        (PACKAGED / f"{module.name}.spv").write_bytes(module.binary)
    entries = {
        module.name: {
            "identity": module.identity,
            "sha256": hashlib.sha256(module.binary).hexdigest(),
            "index_space": module.index_space,
            "parameters": module.parameters,
            "arguments": module.arguments,
            "in_record": module.in_record,
            "capabilities": spirv.capabilities(module.binary),
        }
        for module in modules
    }
    text = json.dumps({"compiler": compiler.VERSION, "modules": entries}, indent=1)
    (PACKAGED / MANIFEST).write_text(text + "\n")
    manifest.cache_clear()
    load.cache_clear()
    return modules


def cache_folder() -> Path:
    """Folder of the modules that were compiled on this machine."""
    import platformdirs

    chosen = os.environ.get("KVCACHE_DPEX_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("kvcache_dpex"))


def _cached(wanted: Signature) -> Module | None:
    """A module from the cache folder; a damaged file counts as absent and is written anew."""
    try:
        sealed = _cache_path(wanted).read_bytes()
    except OSError:
        return None
    binary = sealed[:-32]
    return Module(*wanted, binary, "cache") if sealed == _sealed(binary) else None


def _sealed(binary: bytes) -> bytes:
    return binary + hashlib.sha256(binary).digest()


def _cache_path(wanted: Signature) -> Path:
    return cache_folder() / f"{wanted.name}-{wanted.identity[:16]}.spv"


def _write_atomically(path: Path, content: bytes) -> None:
    """Write so that a reader sees all of it or nothing; a folder that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        return
