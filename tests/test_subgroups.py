"""The sub-group size that a module is given for a CPU device."""

import shutil
import struct
import subprocess
from types import SimpleNamespace

import pytest

from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.runtime.compile import spirv, store
from kvcache_dpex.runtime.launch import launch


@pytest.fixture
def module():
    return store.load(scatter_gpu, slot="int64")


def test_a_required_size_is_one_mode_of_the_entry_point(module):
    changed = spirv.with_subgroup_size(module.binary, 8)
    before, after = (list(spirv.instructions(binary)) for binary in (module.binary, changed))
    (entry,) = [operands[1] for opcode, operands in after if opcode == spirv.OP_ENTRY_POINT]
    capability = spirv.OP_CAPABILITY, (spirv.SUBGROUP_DISPATCH,)
    mode = spirv.OP_EXECUTION_MODE, (entry, spirv.SUBGROUP_SIZE, 8)
    assert [each for each in after if each not in (capability, mode)] == before
    assert (after.count(capability), after.count(mode)) == (1, 1)
    assert "SubgroupDispatch" in spirv.capabilities(changed)


def test_the_version_rises_to_1_1_and_no_further(module):
    """The execution mode is missing before SPIR-V 1.1; what the header says besides stays."""
    changed = spirv.with_subgroup_size(module.binary, 16)
    assert struct.unpack_from("<I", changed, 4) == (0x00010100,)
    assert changed[:4] + changed[8:20] == module.binary[:4] + module.binary[8:20]
    newer = module.binary[:4] + struct.pack("<I", 0x00010400) + module.binary[8:]
    assert spirv.with_subgroup_size(newer, 16)[4:8] == newer[4:8]


@pytest.mark.skipif(shutil.which("spirv-val") is None, reason="spirv-val is not installed")
def test_the_changed_module_is_valid(module, tmp_path):
    file = tmp_path / "module.spv"
    file.write_bytes(spirv.with_subgroup_size(module.binary, 8))
    result = subprocess.run(["spirv-val", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("width", "size"), [(8, 8), (16, 16), (24, 8), (48, 16), (5, 8)])
def test_a_cpu_device_gets_a_size_that_fits_its_work_groups(width, size, module, queue):
    """Without one, a processor with AVX-512 runs work-groups of 8 items one item after the other."""
    device = queue.sycl_device
    if not device.is_cpu:
        pytest.skip("only a CPU device is given a sub-group size")
    assert launch.subgroup_size(device, width) == size
    assert launch.build(module, queue, size).kernel.compile_sub_group_size == size


def test_other_devices_choose_for_themselves():
    gpu = SimpleNamespace(is_cpu=False, sub_group_sizes=[8, 16, 32])
    other_cpu = SimpleNamespace(is_cpu=True, sub_group_sizes=[4])
    assert [launch.subgroup_size(device, 8) for device in (gpu, other_cpu)] == [None, None]
