"""Module gate: what the SPIR-V of every packaged module says, read without any tool."""

import re
import shutil
import struct
import subprocess

import pytest

from kvcache_dpex.runtime.compile import compiler, spirv

from . import planted
from .native import packaged

MODULES = packaged()
OP_DECORATE, OP_TYPE_FLOAT, OP_TYPE_ARRAY, OP_PHI, LINKAGE, IMPORT = 71, 22, 28, 245, 41, 1
ALLOWED_CAPABILITIES = {
    "Addresses",
    "Float16Buffer",  # vload_half and vstore_half: no aspect of the device
    "Groups",
    "Int16",
    "Int64",
    "Int8",
    "Kernel",
    "Linkage",
    "Vector16",
}


def faults(name, binary):
    """What would keep a module from running on some Intel GPU, or make it hard to read."""
    found = [f"capability {name}" for name in spirv.capabilities(binary) if name not in ALLOWED_CAPABILITIES]
    found += [f"extension {name}" for name in spirv.extensions(binary)]
    if binary[4:8] != bytes([0, 0, 1, 0]):
        found.append(f"SPIR-V version {binary[6]}.{binary[5]}")
    if spirv.entry_points(binary) != [name.replace("-", "_")]:
        found.append(f"entry points {spirv.entry_points(binary)}")
    arrays = set()
    for opcode, operands in spirv.instructions(binary):
        if opcode == OP_TYPE_ARRAY:
            arrays.add(operands[0])
        if opcode == OP_PHI and operands[0] in arrays:
            found.append("a tuple that depends on a branch")  # a CPU then handles items one by one
        if opcode == OP_TYPE_FLOAT and operands[1] == 64:
            found.append("a float64 type")
        if opcode in (spirv.OP_NAME, spirv.OP_MEMBER_NAME):
            found.append("debug names")
        if opcode == OP_DECORATE and operands[1] == LINKAGE:
            text = struct.pack(f"<{len(operands) - 2}I", *operands[2:]).split(b"\0")[0].decode()
            imported = operands[-1] == IMPORT and not text.startswith("__spirv_BuiltIn")
            if imported or not re.fullmatch(r"\w{1,64}", text):
                found.append(f"linkage {text}")
    return found


@pytest.mark.parametrize("name", MODULES)
def test_packaged_module_is_clean(name):
    assert faults(name, MODULES[name]) == []


@pytest.mark.skipif(
    shutil.which("spirv-val") is None, reason="spirv-val is not installed (Debian: spirv-tools)"
)
@pytest.mark.parametrize("name", MODULES)
def test_packaged_module_is_valid(name, tmp_path):
    file = tmp_path / "module.spv"
    file.write_bytes(MODULES[name])
    result = subprocess.run(["spirv-val", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(not compiler.available(), reason="compiling a planted fault needs numba-dpex")
def test_a_float64_literal_is_seen():
    module = planted.compiled(planted.float64_literal)
    assert {"capability Float64", "a float64 type"} <= set(faults(module.name, module.binary))


@pytest.mark.parametrize("capability", ["Float64", "Float16"])
def test_a_planted_capability_is_seen(capability):
    numbers = {name: number for number, name in spirv.CAPABILITIES.items()}
    name, binary = next(iter(MODULES.items()))
    extra = struct.pack("<2I", spirv.OP_CAPABILITY | 2 << 16, numbers[capability])
    assert faults(name, binary[:20] + extra + binary[20:]) == [f"capability {capability}"]


def test_a_wrong_name_is_seen():
    binary = next(iter(MODULES.values()))
    assert faults("another", binary) == [f"entry points {spirv.entry_points(binary)}"]
