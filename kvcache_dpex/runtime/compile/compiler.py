"""Compiles a kernel to SPIR-V. It, `lowering` and `lowering_views` alone know numba and LLVM."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

from . import phis, spirv

VERSION = "numba-dpex 0.23.0"
# numba-dpex's defaults of what reaches a kernel.
_DPEX_SETTINGS = {
    "DEBUG": 0,
    "DEBUGINFO_DEFAULT": 0,
    "DPEX_OPT": 2,
    "DUMP_KERNEL_LLVM": 0,
    "INLINE_THRESHOLD": 2,
    "SAVE_IR_FILES": 0,
}


def available() -> bool:
    """Whether numba-dpex is installed (not yet whether it works)."""
    return importlib.util.find_spec("numba_dpex") is not None


@functools.cache
def fingerprint() -> str:
    """What changes the SPIR-V of an unchanged kernel: the compiler's version, and the files that compile.

    Raises OSError where the package comes without its source.
    """
    read: Any = __spec__.loader
    names = "compiler.py", "lowering.py", "lowering_views.py", "parameters.py", "phis.py"
    files = (Path(__file__).with_name(name) for name in names)
    return VERSION + "".join(read.get_data(str(file)).decode() for file in files)


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
    address of a record in memory of them all. No setting of numba or numba-dpex changes the result.
    """
    if fingerprint() != fingerprint.__wrapped__():
        raise RuntimeError("the compiler of kvcache_dpex was edited after it was imported: restart Python")
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
    with global_compiler_lock, _own_settings():
        dispatcher = numba_dpex.kernel(outermost)
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


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Compile with the defaults of numba and numba-dpex, whatever the environment or the user has set.

    The identity of a module knows nothing of these settings: debug information, optimization and others.
    """
    from numba.core import config
    from numba_dpex.core import config as dpex_config

    config.reload_config()  # now, since it would undo what follows if the environment had changed
    saved = [
        (each, {name: vars(each)[name] for name in vars(each) if name.isupper()})
        for each in (config, dpex_config)
    ]
    try:
        config._env_reloader.process_environ({"NUMBA_NUM_THREADS": config.NUMBA_NUM_THREADS})
        vars(dpex_config).update(_DPEX_SETTINGS)
        yield
    finally:
        for each, values in saved:
            vars(each).update(values)


def _llvm_spirv_options() -> int:
    from numba_dpex.kernel_api_impl.spirv.target import LLVM_SPIRV_ARGS

    return LLVM_SPIRV_ARGS


def _clean(text: str, mangled: str, entry: str):
    """The LLVM module with a readable entry point and without numba's unused environment variables."""
    import llvmlite.binding as llvm

    text = re.sub(r"^@_ZN08NumbaEnv.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^.*@llvm\.assume\(.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(@\w+ =) linkonce_odr", r"\1 internal", text, flags=re.MULTILINE)
    text = text.replace(mangled, entry)
    parts = phis.split(text)
    module = llvm.parse_assembly(parts)
    module.verify()
    if parts != text:
        passes = llvm.create_module_pass_manager()
        passes.add_instruction_combining_pass()
        passes.add_dead_code_elimination_pass()
        passes.run(module)
    return module
