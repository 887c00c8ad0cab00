"""Compiles a kernel to SPIR-V. It, `lowering` and `lowering_views` alone know numba and LLVM."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Callable

from . import spirv

VERSION = "numba-dpex 0.23.0"


def available() -> bool:
    """Whether numba-dpex is installed (not yet whether it works)."""
    return importlib.util.find_spec("numba_dpex") is not None


@functools.cache
def fingerprint() -> str:
    """What changes the SPIR-V of an unchanged kernel: the compiler's version, and the files that compile."""
    here = Path(__file__)
    files = here.name, "lowering.py", "lowering_views.py", "parameters.py"
    return VERSION + "".join(here.with_name(file).read_text() for file in files)


def compile_kernel(
    function: Callable,
    index_space: str,
    parameters: tuple[str, ...],
    entry: str,
    helpers: tuple[Callable, ...],
    in_record: bool = False,
) -> bytes:
    """SPIR-V of `function` for argument types such as ``"float32[token, head]"`` and ``"int64"``.

    `index_space` is ``"item[n]"``, or ``"nditem[n]"`` where the kernel asks for its work-group; `helpers`
    are the plain functions that it calls.

    The module has one entry point, named `entry`. It takes what `parameters.flattened` lists: a pointer
    is one argument, not the five of a numba-dpex array. With `in_record` it takes one argument, the
    address of a record in memory of them all.
    """
    numba_dpex = _prepare()
    from numba.core import types
    from numba.core.compiler_lock import global_compiler_lock
    from numba_dpex.core.types.kernel_api.index_space_ids import ItemType, NdItemType
    from numba_dpex.kernel_api_impl.spirv.spirv_generator import llvm_to_spirv

    from . import lowering, lowering_views

    for helper in helpers:
        lowering.allow_helper(helper)
    kind, dimensions = index_space.rstrip("]").split("[")
    index = {"item": ItemType, "nditem": NdItemType}[kind](int(dimensions))
    outermost, kinds = lowering_views.outermost(function, parameters, in_record)
    dispatcher = numba_dpex.kernel(outermost)
    with global_compiler_lock:
        result = dispatcher._compiler.compile((index, *kinds), types.void)
        module = _clean(str(result.library.final_module), result.kernel_device_ir_module.kernel_name, entry)
        result.target_context.extra_compile_options[_llvm_spirv_options()] = [
            "--spirv-max-version=1.1",
            "--spirv-ext=-all",
        ]
        binary = llvm_to_spirv(result.target_context, str(module), module.as_bitcode())
    return spirv.without_names(binary)


@functools.cache
def _prepare():
    """Import numba-dpex with everything that a bare compile needs, and teach it our device functions."""
    try:
        import numba_dpex
    except ImportError as error:
        raise ImportError(
            "compiling a kernel needs numba-dpex: pip install 'kvcache_dpex[jit]' (Python 3.9 to 3.11)"
        ) from error
    installed = f"numba-dpex {importlib.metadata.version('numba-dpex')}"
    if installed != VERSION:
        raise ImportError(
            f"kernels are compiled by {VERSION}, found {installed}: pip install 'kvcache_dpex[jit]'"
        )
    # numba registers `range`, tuples, builtins and number operators on import, which a compile alone skips.
    from numba.cpython import builtins, numbers, rangeobj, tupleobj  # noqa: F401

    return numba_dpex


def _llvm_spirv_options() -> int:
    from numba_dpex.kernel_api_impl.spirv.target import LLVM_SPIRV_ARGS

    return LLVM_SPIRV_ARGS


def _clean(text: str, mangled: str, entry: str):
    """The LLVM module with a readable entry point and without numba's unused environment variables."""
    import llvmlite.binding as llvm

    text = re.sub(r"^@_ZN08NumbaEnv.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^.*@llvm\.assume\(.*\n", "", text, flags=re.MULTILINE)
    module = llvm.parse_assembly(text.replace(mangled, entry))
    module.verify()
    return module
