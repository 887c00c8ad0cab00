"""Bodies in NVPTX for what SPIR-V takes for granted: indices, barriers, reductions, half precision."""

from __future__ import annotations

import re

SPECIAL = "llvm.nvvm.read.ptx.sreg"
BARRIER = "call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)"
REDUCED = "@reduced = internal addrspace(3) global [32 x i32] undef, align 4\n"
BUILT_IN = {
    "GlobalInvocationId": "ctaid * ntid + tid",
    "GlobalSize": "nctaid * ntid",
    "LocalInvocationId": "tid",
    "NumWorkgroups": "nctaid",
    "WorkgroupId": "ctaid",
    "WorkgroupSize": "ntid",
}
LANES = 0xFFFF  # the mask of the 16 that are a work-group and its sub-group
MATH = {"fma": "fma", "rint": "rint", "fabs": "fabs", "fmax": "maxnum", "fmin": "minnum"}


def define(name: str, result: str, kinds: list[str], axes: str) -> str:
    """A built-in of SPIR-V, by its mangled name, with a body."""
    base = re.match(r"_Z(\d+)", name)
    assert base
    what = name[base.end() : base.end() + int(base[1])].removeprefix("__spirv_").removeprefix("ocl_")
    what = what.partition("_R")[0]  # of loads, the name says what they return
    given = ", ".join(f"{kind} %{index}" for index, kind in enumerate(kinds))
    body = _body(what, result, given, kinds, axes)
    if body is None:
        raise NotImplementedError(f"no definition for {what} ({name}); add one here")
    memory = REDUCED if "@reduced" in body else ""
    return f"{memory}define internal {result} @{name}({given}) alwaysinline convergent {{\n{body}\n}}\n"


def _body(what: str, result: str, given: str, kinds: list[str], axes: str) -> str | None:
    if what.startswith("BuiltIn"):
        return _index(BUILT_IN[what.removeprefix("BuiltIn")], axes)
    if what == "ControlBarrier":
        return f"  {BARRIER}\n  ret void"
    if what == "GroupSMax" and result == "i32":
        return _largest_of_group()
    if what in ("GroupFAdd", "GroupFMax") and result == "float":
        add, largest = "fadd float A, B", "call float @llvm.maxnum.f32(float A, float B)"
        return _of_lanes(add if what == "GroupFAdd" else largest)
    if what == "GroupBroadcast":
        letter = "f" if result == "float" else "i"
        shuffle = f"@llvm.nvvm.shfl.sync.idx.{letter}32(i32 {LANES}, {result} %1, i32 %2, i32 31)"
        return f"  %r = call {result} {shuffle}\n  ret {result} %r"
    if what in MATH and result == "float":
        return f"  %r = call float @llvm.{MATH[what]}.f32({given})\n  ret float %r"
    halves = {"float": ("half", 2), "<8 x float>": ("<8 x half>", 16)}
    if what in ("vload_half", "vloada_halfn"):
        half, align = halves[result]
        load = f"  %h = load {half}, ptr addrspace(1) %p, align {align}\n  %r = fpext {half} %h to {result}"
        return f"  %p = getelementptr {half}, ptr addrspace(1) %1, i64 %0\n{load}\n  ret {result} %r"
    if what in ("vstore_half_r", "vstorea_halfn_r"):
        half, align = halves[kinds[0]]
        narrow = f"  %h = fptrunc {kinds[0]} %0 to {half}"
        store_it = f"  store {half} %h, ptr addrspace(1) %p, align {align}"
        return f"{narrow}\n  %p = getelementptr {half}, ptr addrspace(1) %2, i64 %1\n{store_it}\n  ret void"
    return None


def _index(formula: str, axes: str) -> str:
    """The value of an index of the axis %0."""
    lines = []
    for register in re.findall(r"\w+", formula):
        cuda = axes if "cta" in register else "xyz"
        lines += [
            f"  %{register}{n} = call i32 @{SPECIAL}.{register}.{axis}()" for n, axis in enumerate(cuda)
        ]
        lines += [
            f"  %{register}a = select i1 %is1, i32 %{register}1, i32 %{register}0",
            f"  %{register}b = select i1 %is2, i32 %{register}2, i32 %{register}a",
            f"  %{register} = zext i32 %{register}b to i64",
        ]
    head = ["  %is1 = icmp eq i32 %0, 1", "  %is2 = icmp eq i32 %0, 2"]
    first, *rest = re.findall(r"\w+", formula)
    value = f"%{first}"
    for number, (name, operator) in enumerate(zip(rest, re.findall(r"[*+]", formula))):
        word = {"*": "mul", "+": "add"}[operator]
        lines.append(f"  %r{number} = {word} nuw nsw i64 {value}, %{name}")
        value = f"%r{number}"
    return "\n".join([*head, *lines, f"  ret i64 {value}"])


def _of_lanes(step: str) -> str:
    """The float32 of 16 lanes, combined in pairs; `step` combines ``A`` and ``B``."""
    lines, last = [], "%2"
    for distance in (8, 4, 2, 1):
        other, both = f"%other{distance}", f"%both{distance}"
        shuffle = f"@llvm.nvvm.shfl.sync.bfly.f32(i32 {LANES}, float {last}, i32 {distance}, i32 31)"
        lines.append(f"  {other} = call float {shuffle}")
        lines.append(f"  {both} = {step.replace('A', last).replace('B', other)}")
        last = both
    return "\n".join([*lines, f"  ret float {last}"])


def _largest_of_group() -> str:
    """Largest int32 of a work-group of any size: one instruction a warp, then one over the warps."""
    sizes = [f"  %{r}{a} = call i32 @{SPECIAL}.{r}.{a}()" for r in ("tid", "ntid") for a in "xyz"]
    return "\n".join(
        [
            "entry:",
            *sizes,
            """  %plane = mul i32 %ntidx, %ntidy
  %count = mul i32 %plane, %ntidz
  %rowy = mul i32 %tidy, %ntidx
  %rowz = mul i32 %tidz, %plane
  %row = add i32 %rowy, %rowz
  %own = add i32 %row, %tidx
  %warp = lshr i32 %own, 5
  %lane = and i32 %own, 31
  %first = and i32 %own, -32
  %left = sub i32 %count, %first
  %full = icmp uge i32 %left, 32
  %shifted = shl i32 1, %left
  %some = sub i32 %shifted, 1
  %mask = select i1 %full, i32 -1, i32 %some
  %ofwarp = call i32 @llvm.nvvm.redux.sync.max(i32 %2, i32 %mask)
  %single = icmp ule i32 %count, 32
  br i1 %single, label %end, label %more
more:
  %put = getelementptr i32, ptr addrspace(3) @reduced, i32 %warp
  store i32 %ofwarp, ptr addrspace(3) %put, align 4""",
            f"  {BARRIER}",
            """  %round = add i32 %count, 31
  %warps = lshr i32 %round, 5
  %has = icmp ult i32 %lane, %warps
  %from = select i1 %has, i32 %lane, i32 0
  %get = getelementptr i32, ptr addrspace(3) @reduced, i32 %from
  %part = load i32, ptr addrspace(3) %get, align 4
  %ofgroup = call i32 @llvm.nvvm.redux.sync.max(i32 %part, i32 %mask)""",
            f"  {BARRIER}",
            """  br label %end
end:
  %r = phi i32 [ %ofwarp, %entry ], [ %ofgroup, %more ]
  ret i32 %r""",
        ]
    )
