"""The translation to PTX, as far as it goes without an NVIDIA GPU."""

import importlib.util
import shutil
import subprocess

import pytest

from benchmarks.nvidia import translate
from kvcache_dpex.runtime.compile import store

from .native import packaged


def reason():
    """Why nothing can be translated here, or an empty string."""
    if any(importlib.util.find_spec(name) is None for name in ("llvmlite", "dpcpp_llvm_spirv")):
        return "translating needs llvmlite and dpcpp-llvm-spirv"
    import llvmlite.binding

    version = llvmlite.binding.llvm_version_info
    return f"translating needs a newer llvmlite than one of LLVM {version}" if version[0] < 17 else ""


@pytest.mark.skipif(bool(reason()), reason=reason())
@pytest.mark.parametrize("name", packaged())
def test_every_module_becomes_ptx(name, tmp_path):
    ptx, axes = translate.translate(name, packaged()[name], store.manifest()["modules"][name]["index_space"])
    assert sorted(axes) == ["x", "y", "z"]
    assert ".f64" not in ptx
    if shutil.which("ptxas"):
        file = tmp_path / "kernel.ptx"
        file.write_text(ptx)
        command = ["ptxas", "-arch=sm_90", "-v", str(file), "-o", str(tmp_path / "kernel.cubin")]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "0 bytes spill stores" in result.stderr


@pytest.mark.parametrize("kernel", translate.ALIGNED)
def test_aligned_arguments_are_arguments(kernel):
    assert len(translate.aligned_arguments(kernel)) == len(translate.ALIGNED[kernel])
