"""The compiler has settings of its own, whatever the environment or the user has set (numba #10821)."""

import re

import pytest

from helpers import output_of
from kvcache_dpex.kernels.quantize_gpu import quantize_gpu
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.runtime.compile import compiler, parameters, store

pytestmark = pytest.mark.skipif(not compiler.available(), reason="compiling needs numba-dpex")

COMPILE = """
from kvcache_dpex.kernels.quantize_gpu import quantize_gpu
from kvcache_dpex.runtime.compile import store
wanted = store.signature(quantize_gpu, value="float16", code="int8", slot="int64")
print(store.compile_here(quantize_gpu, wanted) == store.packaged(wanted).binary)
"""
SETTINGS = {
    "NUMBA_BOUNDSCHECK": "1",
    "NUMBA_CAPTURED_ERRORS": "new_style",
    "NUMBA_DEBUGINFO": "1",
    "NUMBA_DISABLE_JIT": "1",
    "NUMBA_DPEX_DEBUG": "1",
    "NUMBA_DPEX_DEBUGINFO": "1",
    "NUMBA_DPEX_DUMP_KERNEL_LLVM": "1",
    "NUMBA_DPEX_INLINE_THRESHOLD": "0",
    "NUMBA_DPEX_OPT": "0",
    "NUMBA_DPEX_SAVE_IR_FILES": "1",
    "NUMBA_ENABLE_PROFILING": "1",
    "NUMBA_EXTEND_VARIABLE_LIFETIMES": "1",
    "NUMBA_LOOP_VECTORIZE": "0",
    "NUMBA_OPT": "0",
    "NUMBA_SLP_VECTORIZE": "1",
    "NUMBA_USE_RVSDG_FRONTEND": "1",
}


def test_no_variable_changes_a_module():
    assert output_of(COMPILE, **SETTINGS) == "True"


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("numba_dpex.core.config", "DEBUGINFO_DEFAULT", 1),
        ("numba_dpex.core.config", "DPEX_OPT", 0),
        ("numba_dpex.core.config", "INLINE_THRESHOLD", 0),
        ("numba.core.config", "DEBUGINFO_DEFAULT", 1),
        ("numba.core.config", "USE_RVSDG_FRONTEND", 1),
    ],
)
def test_no_setting_of_the_user_changes_a_module(monkeypatch, module, name, value):
    """And each is what it was when the compiler has ended."""
    config = pytest.importorskip(module)
    monkeypatch.setattr(config, name, value)
    before = dict(vars(config))
    wanted = store.signature(quantize_gpu, value="float16", code="int8", slot="int64")
    assert store.compile_here(quantize_gpu, wanted) == store.packaged(wanted).binary
    assert dict(vars(config)) == before


def test_a_variable_that_is_set_late(monkeypatch):
    """numba reads the environment again whenever it compiles."""
    wanted = store.signature(scatter_gpu, slot="int64")
    for value in ("1", "0"):
        monkeypatch.setenv("NUMBA_DEBUGINFO", value)
        assert store.compile_here(scatter_gpu, wanted) == store.packaged(wanted).binary


def test_settings_are_restored_after_an_error(monkeypatch):
    from numba.core import config

    def fail():
        with compiler._own_settings():
            assert config.DEBUGINFO_DEFAULT == 0
            raise ValueError("inside")

    config.reload_config()
    monkeypatch.setattr(config, "DEBUGINFO_DEFAULT", 1)
    with pytest.raises(ValueError, match="inside"):
        fail()
    assert config.DEBUGINFO_DEFAULT == 1


def test_a_compiler_that_was_edited_after_its_import(monkeypatch):
    """Its old code must not store a module under the new identity."""
    monkeypatch.setattr(compiler.fingerprint, "__wrapped__", lambda: "another")
    message = "the compiler of kvcache_dpex was edited after it was imported: restart Python"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        store.compile_here(scatter_gpu, store.signature(scatter_gpu, slot="int64"))


def test_numba_tells_views_apart():
    """It compiles a helper once for each type of its arguments."""
    texts = "float32[n, part=1]", "float32[n]", "float32[n, part]", "float32*2[n, part=1]", "int32[n, part=1]"
    lowering_views = pytest.importorskip(
        "kvcache_dpex.runtime.compile.lowering_views", reason="the types of views need numba-dpex"
    )
    assert len({lowering_views.View(parameters.parse(text)) for text in texts}) == len(texts)
