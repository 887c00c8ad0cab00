"""Race and bounds gate: every packaged module in Oclgrind, on launches that the operations ask for.

Its results are compared too: Oclgrind is a second implementation of OpenCL beside the CPU device.
"""

import struct

import numpy as np
import pytest

from kvcache_dpex.runtime.compile import spirv, store

from . import oclgrind
from .cases import all_cases, compare
from .standin import Device, record

# Attention on CPU devices uses sub-groups, which Oclgrind does not know, in its first step.
NOT_HERE = {"paged_attention_cpu", "combine_parts"}
MODULES = sorted(name for name in store.manifest()["modules"] if name.split("-")[0] not in NOT_HERE)
DEVICES = Device(), Device(8192, is_cpu=True)
OP_CONTROL_BARRIER = 224

pytestmark = pytest.mark.skipif(
    bool(oclgrind.missing()),
    reason=f"not installed: {', '.join(oclgrind.missing())} (Debian 12: oclgrind llvm-spirv-14 llvm-14)",
)


@pytest.fixture(scope="session")
def cases_of():
    """The cases that launch each module, with the device that chooses it: a GPU, or the CPU device."""
    found = {}
    for device in DEVICES:
        for case in all_cases():
            for launched, _ in record(case.copy(), device):
                known = found.setdefault(launched.module.name, {})
                known.setdefault(case.name, (case, device))
    return {name: list(known.values()) for name, known in found.items()}


def launches(case, device=None):
    """A copy of the case, and its launches over the copy's memory."""
    own = case.copy()
    return own, record(own, device or Device())


def case_named(name):
    (found,) = [case for case in all_cases() if case.name == name]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_race_no_stray_access_and_the_oracles_bytes(module, cases_of):
    assert module in cases_of, f"no adversarial shape for kernel {module}: add a case to tests/gates/cases.py"
    for case, device in cases_of[module]:
        own, launched = launches(case, device)
        for each, views in launched:
            assert oclgrind.run(each, views) == [], case.name
        assert compare(own, case.expected()) == [], case.name


def test_declared_duplicates_are_seen_as_a_race():
    case = case_named("write-uint8-3x1x16-contiguous-int64").copy()
    case.arguments["slot_mapping"][:] = 3
    for each, views in record(case, Device()):
        assert any("Write-write data race" in finding for finding in oclgrind.run(each, views))


@pytest.mark.parametrize("device", DEVICES, ids=["GPU", "CPU"])
def test_a_planted_access_outside_is_seen(device):
    _, [(launched, views)] = launches(case_named("write-float32-7x2x12-contiguous-int64"), device)
    capacity = 12
    guard = launched.scalars.index(capacity, -3)  # the last numbers are num_tokens, num_slots and row
    scalars = list(launched.scalars)
    scalars[guard] = capacity + 2
    findings = oclgrind.run(launched._replace(scalars=tuple(scalars)), views)
    assert any(finding.startswith("Invalid write") for finding in findings)


@pytest.mark.parametrize("device", DEVICES, ids=["GPU", "CPU"])
def test_a_planted_short_row_is_seen(device):
    case = case_named("write-float32-7x2x12-contiguous-int64").copy()
    [(launched, views)] = record(case, device)
    views[0] = np.ascontiguousarray(views[0])[:-2]
    findings = oclgrind.run(launched, views)
    assert any(finding.startswith("Invalid read") for finding in findings)


@pytest.mark.parametrize("value_type", ["float32", "float16", "bfloat16"])
def test_a_missing_barrier_is_seen(value_type):
    _, [(launched, views)] = launches(
        case_named(f"quantize-{value_type}-int8_per_token_head-11x3x64-contiguous-int64")
    )
    binary = without(launched.module.binary, OP_CONTROL_BARRIER)
    assert binary != launched.module.binary
    findings = oclgrind.run(launched._replace(module=launched.module._replace(binary=binary)), views)
    assert any("data race" in finding for finding in findings)


def test_a_barrier_that_only_some_items_reach_is_seen():
    _, [(launched, views)] = launches(
        case_named("quantize-float32-int8_per_token_head-3x2x5-contiguous-int64")
    )
    lanes, _, tokens = launched.global_size
    findings = oclgrind.run(launched._replace(local_size=(lanes, 1, tokens)), views)
    assert any("divergence" in finding for finding in findings)


def without(binary, opcode):
    """The module without one kind of instruction."""
    kept = [binary[:20]]
    for code, operands in spirv.instructions(binary):
        if code != opcode:
            kept.append(struct.pack(f"<{len(operands) + 1}I", code | (len(operands) + 1) << 16, *operands))
    return b"".join(kept)
