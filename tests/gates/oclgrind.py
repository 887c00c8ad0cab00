"""Runs a packaged module in Oclgrind, which sees races, accesses outside of a buffer and divergent barriers.

The module goes through ``llvm-spirv-14 -r`` to the LLVM version that Oclgrind reads. Each pointer
argument gets a buffer of its own that ends where the argument's array ends; a kernel that takes a record
of its arguments gets one more buffer, that record.
"""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from kvcache_dpex.runtime.compile import spirv

from .cases import owner, start
from .standin import Launched

TOOLS = ("oclgrind-kernel", "llvm-spirv-14", "llvm-dis-14", "opt-14")
_DECORATE, _LINKAGE, _BUILT_IN = 71, 41, 11
_INPUTS = {
    "GlobalInvocationId": "_Z13get_global_idj",
    "GlobalSize": "_Z15get_global_sizej",
    "LocalInvocationId": "_Z12get_local_idj",
    "NumWorkgroups": "_Z14get_num_groupsj",
    "WorkgroupId": "_Z12get_group_idj",
    "WorkgroupSize": "_Z14get_local_sizej",
}
_FINDING = re.compile(r"^(?:Invalid|Read-write|Write-write|Work-group divergence|OCLGRIND).*", re.M)


def missing() -> list[str]:
    """Tools that are not installed."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def run(launched: Launched, views: list[np.ndarray]) -> list[str]:
    """Run a launch over NumPy views, one for each pointer; returns what Oclgrind complains about."""
    memory = [_bytes_of(view) for view in views]
    lines = [f"<size={data.size} uchar dump>\n{_numbers(data)}" for data in memory]
    if launched.module.in_record:
        record = [_address(number) for number in range(1, len(memory) + 1)] + [*launched.scalars]
        lines.append(f"<size={8 * len(record)} long>\n{_numbers(record)}")
    else:
        lines += [f"<size=8 long>\n{scalar}" for scalar in launched.scalars]
    sizes = [_numbers((*size, 1, 1)[:3]) for size in (launched.global_size, launched.local_size)]
    entry = spirv.entry_points(launched.module.binary)[0]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "kernel.bc")
        buffers = len(memory) if launched.module.in_record else 0
        program.write_bytes(to_bitcode(launched.module.binary, buffers))
        simulation = Path(folder, "kernel.sim")
        simulation.write_text("\n".join([str(program), entry, *sizes, *lines]) + "\n")
        result = subprocess.run(
            ["oclgrind-kernel", "--data-races", "--max-errors", "20", str(simulation)],
            capture_output=True,
            text=True,
            timeout=300,
        )
    text = result.stdout + result.stderr
    findings = [match[0].strip() for match in _FINDING.finditer(text)]
    if result.returncode:
        findings.append(f"exit status {result.returncode}: {text[-300:]}")
    dumps = re.split(r"^Argument '", result.stdout, flags=re.M)[1:]
    if len(dumps) != len(memory):
        return [*findings, f"{len(dumps)} of {len(memory)} buffers came back: {text[-300:]}"]
    # Views may share memory, so only what a pointer changed is written back.
    for data, before, dump in zip(memory, [data.copy() for data in memory], dumps):
        after = np.array(re.findall(r"\] = (\d+)$", dump, re.M), np.uint8)
        data[after != before] = after[after != before]
    return findings


def _address(number: int) -> int:
    """Where Oclgrind's `number`-th buffer begins."""
    return number << 48


def to_llvm(binary: bytes, buffers: int = 0) -> str:
    """LLVM 14's text of a module, in terms that Oclgrind knows.

    With `buffers`, the kernel takes the address of a record: it gets so many buffers and the record instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        module, bitcode = Path(folder, "kernel.spv"), Path(folder, "kernel.bc")
        module.write_bytes(_with_plain_inputs(binary))
        _tool("llvm-spirv-14", "-r", str(module), "-o", str(bitcode))
        text = _tool("llvm-dis-14", str(bitcode), "-o", "-")
    text = _declare_used(_define_collectives(_call_inputs(text)))
    entry = spirv.entry_points(binary)[0]
    return _name_local_memory(_take_record(text, entry, buffers) if buffers else text, entry)


def _take_record(text: str, entry: str, buffers: int) -> str:
    """A kernel of buffers and a record in the place of one that takes the record's address."""
    body = "define internal spir_func void @body(i64 %0) alwaysinline {"
    text = re.sub(rf"^define spir_kernel void @{entry}\(i64 %0\).*$", body, text, flags=re.M)
    pointers = "".join(f"i8 addrspace(1)* %buffer.{number}, " for number in range(buffers))
    return f"""{text}
define spir_kernel void @{entry}({pointers}i64 addrspace(1)* %record) !kernel_arg_addr_space !100 {{
  %address = ptrtoint i64 addrspace(1)* %record to i64
  call spir_func void @body(i64 %address)
  ret void
}}
!100 = !{{{", ".join(["i32 1"] * (buffers + 1))}}}
"""


def _tool(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr[:500]}")
    return result.stdout


@functools.cache
def to_bitcode(binary: bytes, buffers: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        text, bitcode = Path(folder, "kernel.ll"), Path(folder, "kernel.bc")
        text.write_text(to_llvm(binary, buffers))
        _tool("opt-14", "-passes=always-inline", str(text), "-o", str(bitcode))
        return bitcode.read_bytes()


def _with_plain_inputs(binary: bytes) -> bytes:
    """The module with its built-in inputs as plain globals: llvm-spirv-14 knows only one way to read them."""
    kept = [binary[:20]]
    for opcode, operands in spirv.instructions(binary):
        if opcode == _DECORATE and operands[1] == _BUILT_IN:
            continue
        raw = struct.pack(f"<{len(operands) + 1}I", opcode | (len(operands) + 1) << 16, *operands)
        if opcode == _DECORATE and operands[1] == _LINKAGE:
            raw = raw.replace(b"__spirv_BuiltIn", b"__input_BuiltIn")
        kept.append(raw)
    return b"".join(kept)


def _call_inputs(text: str) -> str:
    """Replace every read of an input by calls of the OpenCL function; a numbered value stays numbered."""
    pointers = []

    def pointer(match: re.Match) -> str:
        pointers.append(match["result"])
        return f"  {match['result']} = call spir_func i64 @{_INPUTS[match['name']]}(i32 {match['axis'] or 0})"

    def vector(match: re.Match) -> str:
        lines, last = [], "undef"
        for axis in "012":
            part = f"%input.{match.start()}.{axis}"
            lines.append(f"  {part} = call spir_func i64 @{_INPUTS[match['name']]}(i32 {axis})")
            filled = match["result"] if axis == "2" else f"{part}.v"
            lines.append(f"  {filled} = insertelement <3 x i64> {last}, i64 {part}, i32 {axis}")
            last = filled
        return "\n".join(lines)

    result, inputs = r"^  (?P<result>%\S+) = ", r"<3 x i64> addrspace\(1\)\* @__input_BuiltIn(?P<name>\w+)"
    element = r"getelementptr (?:inbounds )?<3 x i64>, "
    text = re.sub(rf"{result}{element}{inputs}, i\d+ 0, i\d+ (?P<axis>\d)$", pointer, text, flags=re.M)
    text = re.sub(rf"{result}bitcast {inputs} to i64 addrspace\(1\)\*(?P<axis>)$", pointer, text, flags=re.M)
    text = re.sub(rf"{result}load <3 x i64>, {inputs}, align \d+$", vector, text, flags=re.M)
    for name in pointers:
        read = rf"= load i64, i64 addrspace\(1\)\* {re.escape(name)}, align \d+$"
        text = re.sub(read, f"= add i64 {name}, 0", text, flags=re.M)
    text = re.sub(r"^@__input_BuiltIn.*\n", "", text, flags=re.M)
    unknown = re.search(r".*@__input_BuiltIn.*", text)
    if unknown:
        raise NotImplementedError(f"a read of an input that has no rule here: {unknown[0].strip()}")
    return text


# Oclgrind has neither these functions nor sub-groups. Where kernels use a sub-group, it is the work-group.
_MAX = """  %above = COMPARE KIND %other, %best
  %better = select i1 %above, KIND %other, KIND %best"""
_ADD = "  %better = fadd KIND %best, %other"
_BROADCAST = """  %wanted = zext i32 %lane to i64
  %found = icmp eq i64 %i, %wanted
  %better = select i1 %found, KIND %other, KIND %best"""
# How the items' values are combined, from what on, and the arguments.
_COLLECTIVES = {
    "reduce_max": (_MAX, "%x", "KIND %x"),
    "reduce_add": (_ADD, "0.0", "KIND %x"),
    "broadcast": (_BROADCAST, "%x", "KIND %x, i32 %lane"),
}
_COLLECTIVE = """
define internal spir_func KIND @NAME(ARGUMENTS) alwaysinline {
  %lx = call spir_func i64 @_Z12get_local_idj(i32 0)
  %ly = call spir_func i64 @_Z12get_local_idj(i32 1)
  %lz = call spir_func i64 @_Z12get_local_idj(i32 2)
  %nx = call spir_func i64 @_Z14get_local_sizej(i32 0)
  %ny = call spir_func i64 @_Z14get_local_sizej(i32 1)
  %nz = call spir_func i64 @_Z14get_local_sizej(i32 2)
  %plane = mul i64 %lz, %ny
  %row = add i64 %plane, %ly
  %before = mul i64 %row, %nx
  %own = add i64 %before, %lx
  %nxy = mul i64 %nx, %ny
  %count = mul i64 %nxy, %nz
  %put = getelementptr [1024 x KIND], [1024 x KIND] addrspace(3)* @reduced.KIND, i64 0, i64 %own
  store KIND %x, KIND addrspace(3)* %put, align 4
  call spir_func void @_Z7barrierj(i32 1)
  br label %loop
loop:
  %i = phi i64 [ 0, %0 ], [ %next, %loop ]
  %best = phi KIND [ FIRST, %0 ], [ %better, %loop ]
  %get = getelementptr [1024 x KIND], [1024 x KIND] addrspace(3)* @reduced.KIND, i64 0, i64 %i
  %other = load KIND, KIND addrspace(3)* %get, align 4
STEP
  %next = add i64 %i, 1
  %done = icmp eq i64 %next, %count
  br i1 %done, label %end, label %loop
end:
  call spir_func void @_Z7barrierj(i32 1)
  ret KIND %better
}
"""


def _define_collectives(text: str) -> str:
    kinds = set()

    def define(match: re.Match) -> str:
        kind = match["kind"]
        kinds.add(kind)
        step, first, arguments = _COLLECTIVES[match["what"]]
        body = _COLLECTIVE.replace("STEP", step).replace("FIRST", first).replace("ARGUMENTS", arguments)
        compare = "fcmp ogt" if kind == "float" else "icmp sgt"
        return body.replace("COMPARE", compare).replace("KIND", kind).replace("NAME", match["name"])

    declared = (
        r"^declare spir_func (?P<kind>float|i32) "
        r"@(?P<name>_Z\d+(?:work|sub)_group_(?P<what>reduce_max|reduce_add|broadcast)[fi]j?)\(.*$"
    )
    text = re.sub(declared, define, text, flags=re.M)
    return text + "".join(
        f"@reduced.{kind} = internal addrspace(3) global [1024 x {kind}] undef, align 4\n" for kind in kinds
    )


def _declare_used(text: str) -> str:
    """Declare the functions that were added without a declaration."""
    kinds = {"_Z7barrierj": "void", **dict.fromkeys(_INPUTS.values(), "i64")}
    used = [name for name in kinds if f"@{name}(" in text]
    return text + "".join(
        f"declare spir_func {kinds[name]} @{name}(i32)\n"
        for name in used
        if not re.search(rf"^declare .*@{name}\(", text, re.M)
    )


def _name_local_memory(text: str, entry: str) -> str:
    """Oclgrind gives a kernel only the local memory whose name begins with the kernel's."""
    for name in re.findall(r"^@(\S+) = internal addrspace\(3\)", text, re.M):
        text = re.sub(rf"@{re.escape(name)}\b", f"@{entry}.{name}", text)
    return text


def _bytes_of(view: np.ndarray) -> np.ndarray:
    """The bytes from a view's first to its last element, as a view of the same memory."""
    extent = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides))
    if view.size == 0 or any(stride < 0 for stride in view.strides):
        raise ValueError(f"a buffer must start at its first element, got {view.shape} with {view.strides}")
    return np.ndarray(extent + view.itemsize, np.uint8, owner(view), start(view))


def _numbers(values) -> str:
    return " ".join(map(str, values))
