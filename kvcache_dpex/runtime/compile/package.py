"""The packaged modules as a whole: which kernels there are, compiling them, and what is wrong with them."""

from __future__ import annotations

import hashlib
import itertools
import json
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Callable

from . import compiler, edits, elsewhere, spirv, store

_KERNELS = Path(__file__).parents[2] / "kernels"


def catalogue() -> list[tuple[Callable, dict[str, str]]]:
    """Every kernel of the `kernels` folder with every choice of its type variables."""
    found = []
    for name in sorted(info.name for info in pkgutil.iter_modules([str(_KERNELS)])):
        module = import_module(f"...kernels.{name}", __package__)
        choices = getattr(module, "TYPES", None)
        if choices is not None:
            function = getattr(module, name)
            found += [
                (function, dict(zip(choices, values))) for values in itertools.product(*choices.values())
            ]
    return found


def build_package(progress: Callable = iter) -> list[store.Module]:
    """Compile the catalogue into the package and write its manifest; needs numba-dpex."""
    modules = []
    for function, choice in progress(catalogue()):
        wanted = store.signature(function, **choice)
        modules.append(store.Module(*wanted, store.compile_signature(function, wanted), "compiled"))
    for stale in store.PACKAGED.glob("*.spv"):
        stale.unlink()
    for module in modules:
        (store.PACKAGED / f"{module.name}.spv").write_bytes(module.binary)
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
    (store.PACKAGED / store.MANIFEST).write_text(text + "\n", encoding="utf-8")
    store.manifest.cache_clear()
    edits.forget()
    return modules


def problems() -> list[str]:
    """What keeps kernels from being found or compiled, with the remedy; empty where all is well."""
    kernels = catalogue()
    if not kernels:
        return [f"no kernel in {_KERNELS}: {store.REINSTALL}"]
    try:
        wanted = [store.signature(function, **types) for function, types in kernels]
        missing = [each.name for each in wanted if store.packaged(each) is None]
        can_compile = compiler.available() or elsewhere.named() or elsewhere.installed()
    except (ImportError, RuntimeError) as error:
        return [str(error)]
    count = f"{len(missing)} of {len(kernels)} kernels are not packaged with this source"
    if missing and not all(edits.text(function) for function, _ in kernels):
        return [f"{count} and cannot be compiled, since {store.NO_SOURCE}"]
    if missing and not can_compile:
        return [f"{count}, and compiling them needs numba-dpex: {elsewhere.REMEDY}"]
    return []
