"""Compiles a kernel in another Python, which has numba-dpex, as a short-lived process.

numba-dpex ends at Python 3.11 and needs packages of 2024, while compiling needs no device. The other
Python imports the source tree of this package, works out the kernel's identity anew, and returns
SPIR-V only where it is the one that was asked for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from . import cache, edits, spirv

if TYPE_CHECKING:
    from .store import Signature

VARIABLE = "KVCACHE_DPEX_COMPILER"
REMEDY = (
    "pip install 'kvcache_dpex[jit]' (Python 3.9 to 3.11), or `python -m kvcache_dpex kernels compiler`, "
    f"which installs it beside this Python, or set {VARIABLE} to a Python that has it"
)
_PACKAGE = __name__.split(".runtime")[0]
_VERSIONS = ("3.11", "3.10", "3.9")
_BOOTSTRAP = """
import importlib.machinery, importlib.util, sys
spec = importlib.machinery.PathFinder.find_spec("kvcache_dpex", [sys.argv[1]])
sys.modules["kvcache_dpex"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from kvcache_dpex.runtime.compile import elsewhere
elsewhere.serve()
"""


def named() -> str | None:
    """The Python that ``KVCACHE_DPEX_COMPILER`` names."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return None
    found = shutil.which(os.path.expanduser(chosen))
    if found is None:
        raise ImportError(
            f"{VARIABLE} must name a Python that has numba-dpex, got {chosen!r}, which is no program"
        )
    return os.path.abspath(found)


def installed() -> str | None:
    """The Python that `install` has made in the cache folder."""
    python = _environment_python()
    return str(python) if cache.folder_problem() is None and python.exists() else None


def install() -> str:
    """Make an environment with numba-dpex in the cache folder and return its Python; takes minutes.

    Raises RuntimeError where there is no Python 3.9 to 3.11 or pip fails.
    """
    base = _base_python()
    folder = _environment_python().parents[1]
    shutil.rmtree(folder, ignore_errors=True)
    _succeed([base, "-m", "venv", str(folder)])
    try:
        pip = [str(_environment_python()), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        _succeed([*pip, *_requirements()])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half an environment must not be found
        raise
    return str(_environment_python())


def compile_kernel(python: str, function: Callable, wanted: Signature) -> bytes:
    """SPIR-V of a kernel, compiled by another Python from the same files."""
    request = {"module": _place(function), "function": function.__name__, "wanted": wanted}
    done = subprocess.run(
        [python, "-c", _BOOTSTRAP, str(Path(__file__).parents[3])],
        input=json.dumps(request).encode(),
        capture_output=True,
        cwd="/",
        env=_environment(python),
        check=False,
    )
    if done.returncode != 0 or not spirv.is_module(done.stdout, wanted.name.replace("-", "_")):
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{python} could not compile kernel {wanted.name}: {said[-1]}")
    return done.stdout


def serve() -> None:
    """In the other Python: compile what standard input asks for, to standard output."""
    from . import compiler, store

    output = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed must not get between the bytes
    request = json.load(sys.stdin)
    if not compiler.available():
        raise ImportError(f"numba-dpex is not installed there: {REMEDY}")
    wanted = store.Signature(*request["wanted"])
    wanted = wanted._replace(parameters=tuple(wanted.parameters), arguments=tuple(wanted.arguments))
    function = getattr(_import(request["module"]), request["function"])
    if store.identity(function, wanted.index_space, wanted.parameters, wanted.in_record) != wanted.identity:
        raise RuntimeError("its source was edited after it was imported: restart Python")
    binary = store.compile_here(function, wanted)
    with open(output, "wb") as file:
        file.write(binary)


def _place(function: Callable) -> str:
    """How the other Python finds the module: a name within this package, or the path of a file."""
    module = function.__module__
    if module.startswith(f"{_PACKAGE}."):
        return module[len(_PACKAGE) :]
    path = edits.file(function)
    if module == "__main__" or not os.path.isfile(path):
        raise RuntimeError(
            f"a kernel that another Python compiles must be in a module of its own, got {function.__name__} "
            f"of {path}; in a Python with numba-dpex it can be anywhere"
        )
    return os.path.abspath(path)


def _import(place: str) -> Any:
    if place.startswith("."):
        return import_module(place, _PACKAGE)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def _environment(python: str) -> dict[str, str]:
    """Our variables without those that would lead another Python to our packages."""
    own = python == sys.executable
    return {name: value for name, value in os.environ.items() if own or not name.startswith("PYTHON")}


def _environment_python() -> Path:
    return cache.cache_folder() / "compiler" / "bin" / "python"


def _base_python() -> str:
    """A Python that numba-dpex supports: this one, one on PATH, or one of pyenv's."""
    names = [sys.executable, *(f"python{version}" for version in _VERSIONS)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"), "versions")
    names += [str(path) for version in _VERSIONS for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    report = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for name in names:
        found = shutil.which(name)
        if found is not None:
            done = subprocess.run([found, "-c", report], capture_output=True, text=True, check=False)
            if done.stdout.strip() in _VERSIONS:
                return found
    raise RuntimeError(
        "numba-dpex needs Python 3.9, 3.10 or 3.11, and none is on PATH or in ~/.pyenv; "
        "install one, for instance: sudo apt install python3.11-venv, or pyenv install 3.11"
    )


def _requirements() -> list[str]:
    """The jit extra, as the installed package declares it."""
    try:
        declared = importlib.metadata.requires("kvcache_dpex") or []
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            "what to install is declared by the installed package, and kvcache_dpex is not installed: "
            "pip install kvcache_dpex"
        ) from None
    return [line.split(";")[0].strip() for line in declared if "jit" in line.partition("extra ==")[2]]


def _succeed(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise RuntimeError(f"{' '.join(command)} failed: {' '.join(said)}")
