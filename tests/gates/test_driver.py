"""Driver gate: Intel's real Level Zero driver takes every launch, on simulated GPUs of several products.

Nothing is executed there, so no result is looked at; what is shown is that devices are found and chosen,
modules are built by the real compiler, limits are kept and refusals are errors, not crashes.
"""

import json
import os
import subprocess

import pytest

from helpers import ROOT
from kvcache_dpex.runtime.compile import compiler, store

from . import planted, simulated

# Product: whether it has float64, and the most items of a work-group.
PRODUCTS = {"tgllp": (False, 512), "dg2": (False, 1024), "bmg": (True, 1024)}
# Kernels that no GPU is given.
CPU_ONLY = {
    "combine_parts",
    "dequantize_cpu",
    "move_blocks_cpu",
    "paged_attention_cpu",
    "quantize_cpu",
    "scatter_cpu",
}

pytestmark = pytest.mark.skipif(simulated.missing() is not None, reason=simulated.missing() or "")


@pytest.fixture(scope="session")
def reports():
    """What each product's run of every operation reported."""
    found = {}

    def report(product):
        if product not in found:
            result = simulated.run(product, "-W", "error", "-m", "tests.gates.driver", "operations")
            assert result.returncode == 0, result.stderr[-3000:]
            found[product] = json.loads(result.stdout)
        return found[product]

    return report


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_gpu_is_the_default_device_with_its_own_limits(product, reports):
    report = reports(product)
    assert report["device"] == "level_zero:gpu:0"
    assert report["caches"] == ["level_zero:gpu:0"]
    assert (report["fp64"], report["limit"]) == PRODUCTS[product]


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_kernel_is_built_and_launched_within_the_limit(product, reports):
    groups = reports(product)["groups"]
    expected = {name for name in store.manifest()["modules"] if name.split("-")[0] not in CPU_ONLY}
    assert set(groups) == expected
    assert max(groups.values()) <= PRODUCTS[product][1]


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_main_job_runs_to_its_end(product, reports):
    assert len(reports(product)["claims"]) == 8


@pytest.mark.parametrize(("product", "size", "accepted"), [("tgllp", 512, True), ("tgllp", 1024, False)])
def test_a_work_group_beyond_the_limit_is_an_error(product, size, accepted):
    result = simulated.run(product, "-m", "tests.gates.driver", "group", str(size))
    if accepted:
        assert result.returncode == 0, result.stderr[-3000:]
    else:
        assert result.returncode == 1
        assert "RuntimeError: the SYCL runtime refused to launch" in result.stderr


@pytest.mark.skipif(not compiler.available(), reason="compiling a planted fault needs numba-dpex")
@pytest.mark.parametrize(("product", "accepted"), [("tgllp", False), ("dg2", False), ("bmg", True)])
def test_a_module_with_float64_is_an_error_where_there_is_none(product, accepted, tmp_path):
    file = tmp_path / "float64_literal.spv"
    file.write_bytes(planted.compiled(planted.float64_literal).binary)
    result = simulated.run(product, "-m", "tests.gates.driver", "build", str(file))
    if accepted:
        assert result.returncode == 0, result.stderr[-3000:]
    else:
        assert result.returncode == 1
        assert "RuntimeError: the driver of Intel(R) Graphics" in result.stderr
        assert "refuses kernel float64_literal" in result.stderr


def test_libraries_are_found_under_a_newer_c_library():
    """glibc refuses since 2.41 what older ones load."""
    code = (
        "import os, kvcache_dpex; key_cache, _ = kvcache_dpex.empty_cache(2, 4, 1, 8)\n"
        "print(os.confstr('CS_GNU_LIBC_VERSION'), int((key_cache + 1).sum()))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["PYTHONPATH"] = str(ROOT)
    python = simulated.python_with_newer_c_library()
    done = subprocess.run([*python, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    library, version, total = done.stdout.split()
    assert (library, total) == ("glibc", "64")
    assert tuple(map(int, version.split("."))) >= (2, 41)
