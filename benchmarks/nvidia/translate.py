"""Packaged SPIR-V to PTX: ``python -m benchmarks.nvidia.translate FOLDER``.

The kernel's body is not edited. Its calls of SPIR-V built-ins get definitions made of NVVM intrinsics,
and the kernel itself becomes the entry point. Needs ``pip install llvmlite dpcpp-llvm-spirv`` (an llvmlite
whose LLVM has NVPTX and opaque pointers, such as 0.50); no GPU and no CUDA toolkit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Callable

from kvcache_dpex.runtime.compile import spirv, store

from . import builtins
from .table import digest_of_modules

TARGET = "sm_90", "+ptx80"
# Private 0, global 1 and local (CUDA: shared) 3 have the same numbers in both; no kernel uses others.
LAYOUT = "e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64"
TRIPLE = "nvptx64-nvidia-cuda"
# Of what number of bytes the operations pass a pointer only where it is a multiple.
ALIGNED = {
    "scatter_gpu": {"key": 16, "value": 16, "key_cache": 16, "value_cache": 16},
    "quantize_gpu": {"key": 16, "value": 16},
    "dequantize_gpu": {"codes": 8, "out": 16},
    "dequantize_gpu_float32": {"codes": 4, "out": 16},
}
# The axis with the most work-groups, where it is not the last: only CUDA's x takes more than 65535.
LONG_AXIS = {"dequantize_gpu": 1, "dequantize_gpu_float32": 1}


def translate(name: str, binary: bytes, index_space: str) -> tuple[str, str]:
    """PTX of a packaged module, and the CUDA grid axes of its axes 0, 1, 2."""
    kernel = name.split("-")[0]
    axes = grid_axes(kernel, int(index_space.rstrip("]").split("[")[1]))
    text = to_nvptx(_read(binary), axes, aligned_arguments(kernel))
    return _emit(text), axes


def grid_axes(kernel: str, dimensions: int) -> str:
    """
    >>> grid_axes("scatter_gpu", 2), grid_axes("scatter_strided", 3)
    ('yxz', 'zyx')
    """
    axes = list("xyz")
    long = LONG_AXIS.get(kernel, dimensions - 1)
    axes[0], axes[long] = axes[long], axes[0]
    return "".join(axes)


def aligned_arguments(kernel: str) -> dict[int, int]:
    """What `ALIGNED` says, by the positions of the arguments."""
    function = getattr(import_module(f"kvcache_dpex.kernels.{kernel}"), kernel)
    _, *names = function.__annotations__
    return {names.index(name): size for name, size in ALIGNED.get(kernel, {}).items()}


def to_nvptx(text: str, axes: str, aligned: dict[int, int]) -> str:
    """LLVM's text for SPIR as text for NVPTX."""
    other = re.search(r"addrspace\((?![13]\))\d\)", text)
    if other:
        raise NotImplementedError(f"no counterpart for {other[0]}")
    text = re.sub(r"^target .*\n", "", text, flags=re.M)
    text = re.sub(r"\bspir_func ", "", text)
    text = re.sub(r"^define spir_kernel (.*)$", lambda match: _entry(match[1], aligned), text, flags=re.M)
    support, declared = [], set()

    def define(match: re.Match) -> str:
        kinds = [_kind(argument) for argument in _split(match["arguments"])]
        support.append(builtins.define(match["name"], match["result"], kinds, axes))
        return ""

    pattern = r"^declare (?P<result><[^>]+>|\S+) @(?P<name>_Z\w+)\((?P<arguments>.*)\).*$"
    text = re.sub(pattern, define, text, flags=re.M)
    needed = "\n".join(support)
    intrinsic = r"call (?P<result>\w+|<[^>]+>) @(?P<name>llvm[\w.]+)\((?P<given>.*)\)"
    for call in re.finditer(intrinsic, needed):
        kinds = [_kind(argument) for argument in _split(call["given"])]
        declared.add(f"declare {call['result']} @{call['name']}({', '.join(kinds)})")
    head = f'target datalayout = "{LAYOUT}"\ntarget triple = "{TRIPLE}"\n'
    return "\n".join([head, text, needed, *sorted(declared)]) + "\n"


def _split(arguments: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^<]*>)", arguments) if part.strip()]


def _kind(argument: str) -> str:
    """The type of an argument, without its attributes and its name."""
    found = re.match(r"<[^>]+>|ptr(?: addrspace\(\d\))?|\w+", argument)
    assert found, argument
    return found[0]


def _entry(signature: str, aligned: dict[int, int]) -> str:
    """The kernel as an entry point, with what is known of its pointers."""
    for position, size in aligned.items():
        pointer = rf"(ptr addrspace\(1\))((?: [\w()]+)* %{position}\b)"
        signature = re.sub(pointer, rf"\1 align {size}\2", signature)
    return f"define ptx_kernel {signature}"


def _read(binary: bytes) -> str:
    """LLVM's text of a SPIR-V module, with built-ins as calls of ``__spirv_`` functions."""
    import llvmlite.binding as llvm

    package = importlib.util.find_spec("dpcpp_llvm_spirv")
    if package is None or package.origin is None:
        raise SystemExit("translating needs dpcpp-llvm-spirv: pip install llvmlite dpcpp-llvm-spirv")
    if llvm.llvm_version_info[0] < 17:
        raise SystemExit(f"translating needs a newer llvmlite than one of LLVM {llvm.llvm_version_info}")
    program = Path(package.origin).with_name("bin") / "llvm-spirv"
    with tempfile.TemporaryDirectory() as folder:
        module, bitcode = Path(folder, "kernel.spv"), Path(folder, "kernel.bc")
        module.write_bytes(binary)
        subprocess.run(
            [str(program), "-r", "--spirv-target-env=SPV-IR", str(module), "-o", str(bitcode)], check=True
        )
        return str(llvm.parse_bitcode(bitcode.read_bytes()))


def _emit(text: str) -> str:
    """PTX of NVPTX text, after LLVM's own optimizer."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(text)
    module.verify()
    target = llvm.Target.from_triple(TRIPLE)
    machine = target.create_target_machine(cpu=TARGET[0], features=TARGET[1], opt=3)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return bytes_from_halves(loose_division(machine.emit_assembly(module)))


def loose_division(ptx: str) -> str:
    """Division as OpenCL allows it, a unit or two in the last place off: kernels rely on no better.

    >>> loose_division("rcp.rn.f32 %f1, %f2;")
    'rcp.approx.f32 %f1, %f2;'
    """
    return ptx.replace("div.rn.f32", "div.full.f32").replace("rcp.rn.f32", "rcp.approx.f32")


def bytes_from_halves(ptx: str) -> str:
    """Stores of a byte from a 16-bit register.

    LLVM stores the lowest byte of a 32-bit register that holds a sum of floats, which PTX allows and a
    driver (580.159) gets wrong: it stored -1 in the place of other codes.
    """
    return re.sub(
        r"st\.global\.b8 \t(\[[^\]]+\]), (%r\d+);",
        r"{ .reg .b16 %low; cvt.u16.u32 %low, \2; st.global.b8 \1, %low; }",
        ptx,
    )


def write(folder: Path, note: Callable[[str], Any] = print) -> None:
    """Translate every packaged module into a folder, with a list of them."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = {}
    for name, entry in store.manifest()["modules"].items():
        binary = (store.PACKAGED / f"{name}.spv").read_bytes()
        ptx, axes = translate(name, binary, entry["index_space"])
        (folder / f"{name}.ptx").write_text(ptx)
        listed[name] = {"entry": spirv.entry_points(binary)[0], "grid": axes}
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    head = {
        "commit": git.stdout.strip(),
        "digest": digest_of_modules(),
        "target": TARGET[0],
        "modules": listed,
    }
    (folder / "modules.json").write_text(json.dumps(head, indent=1) + "\n")
    note(f"{len(listed)} modules for {TARGET[0]} in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
