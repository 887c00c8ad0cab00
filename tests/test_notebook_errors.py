"""What a notebook shows of a user's error: the cell, the message, and little in between."""

import contextlib
import io

import pytest

pytest.importorskip("IPython", reason="the notebooks need kvcache_dpex[notebook]: ipykernel")
from IPython.core.interactiveshell import InteractiveShell

SETUP = """
import dpnp
import kvcache_dpex as kv
caches = kv.empty_cache(4, 4, 2, 8, device="cpu")
codes = kv.empty_quant_cache(4, 4, 2, 8, device="cpu")
key, slots = dpnp.ones((3, 2, 8), dtype="float64", device="cpu"), dpnp.asarray([1, 2, 3], device="cpu")
cache = kv.PagedCache(num_layers=1, num_blocks=3, block_size=4, num_kv_heads=2, head_size=8, device="cpu")
def kernel(item: "item[1]", data): pass
"""
CELLS = [
    "kv.reshape_and_cache(key, key, *caches, slots)",
    "kv.reshape_and_cache(key, key, *caches, [1, 2, 3])",
    "kv.dequant_cache(codes[0], codes[1])",
    "kv.slot_mapping(slots, slots, 4)",
    "kv.empty_cache(1, 1, 1, 1, device='fpga')",
    "kv.empty_cache(-1, 1, 1, 1)",
    "kv.launch_kernel(kernel, [4], key)",
    "kv.PagedCache(1, 3, 4, 2, -8)",
    "kv.no_such_name",
]
ON_TENSORS = """
import torch
import kvcache_dpex.torch as kvt
tensors, rows = kvt.empty_cache(4, 4, 2, 8, device="cpu"), torch.ones(3, 2, 8)
"""
CELLS_ON_TENSORS = [
    "kvt.reshape_and_cache(rows.double(), rows.double(), *tensors, torch.tensor([1, 2, 3]))",
    "kvt.reshape_and_cache(rows, rows, *tensors, [1, 2, 3])",
]


def shown(*cells):
    """What the last cell shows."""
    shell = InteractiveShell(colors="nocolor")
    for cell in cells:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            shell.run_cell(cell)
    return output.getvalue()


@pytest.mark.parametrize("cell", CELLS)
def test_errors_are_short(cell):
    text = shown(SETUP, cell)
    assert f"----> 1 {cell}" in text
    assert len(text.splitlines()) <= 15, text


@pytest.mark.parametrize("cell", CELLS_ON_TENSORS)
def test_errors_are_short_on_tensors(cell):
    pytest.importorskip("torch", reason="torch is not installed")
    text = shown(ON_TENSORS, cell)
    assert f"----> 1 {cell}" in text
    assert "During handling" not in text
    assert len(text.splitlines()) < 20, text  # with a frame of torch's own


def test_running_out_of_blocks_is_short():
    text = shown(SETUP, "with cache.step({'a': 50}): pass")
    assert "OutOfBlocks: sequence 'a' needs 13 blocks" in text
    assert len(text.splitlines()) < 30, text  # with frames of contextlib and of the pool
