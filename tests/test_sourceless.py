"""The package without its .py files, or in a zip file: packaged kernels run, nothing is called edited."""

import compileall
import shutil
import zipfile

import pytest

from helpers import ROOT, run_python

LOAD = """
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.runtime.compile import compiler, elsewhere, package, store
module = store.load(scatter_gpu, slot="int64")
print(module.origin, len(package.catalogue()) == len(store.manifest()["modules"]))
compiler.available = lambda: True
print(package.problems())
"""


@pytest.fixture
def compiled_only(tmp_path):
    """pyinstaller #6865, Nuitka #3107: the package as .pyc files."""
    folder = tmp_path / "made" / "kvcache_dpex"
    shutil.copytree(ROOT / "kvcache_dpex", folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(folder, quiet=1, legacy=True)
    for file in folder.rglob("*.py"):
        file.unlink()
    return folder.parent


@pytest.fixture
def zipped(tmp_path):
    """numba #4908."""
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for file in (ROOT / "kvcache_dpex").rglob("*"):
            if "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(ROOT))
    return tmp_path / "package.zip"


def run(path, folder, code=LOAD, **variables):
    """From a folder that is not the checkout."""
    cache = {"KVCACHE_DPEX_CACHE": str(folder / "cache"), "KVCACHE_DPEX_KERNELS": None}
    return run_python(code, path=folder, **{**cache, "PYTHONPATH": str(path), **variables})


def test_compiled_files_alone(compiled_only, tmp_path):
    done = run(compiled_only, tmp_path)
    assert done.stdout == "packaged True\n[]\n", done.stderr


REASON = "cannot be compiled, since kvcache_dpex is here without its source: reinstall it with its .py files"


@pytest.mark.parametrize("packaged", [True, False])
def test_compiled_files_alone_are_not_compiled(compiled_only, tmp_path, packaged):
    """Nothing may be stored under an identity that nobody knows."""
    for file in () if packaged else (compiled_only / "kvcache_dpex" / "spirv").iterdir():
        file.unlink()
    done = run(compiled_only, tmp_path, KVCACHE_DPEX_KERNELS="compile" if packaged else None)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == f"ImportError: kernel scatter_gpu-int64 {REASON}"
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_what_doctor_says_of_compiled_files_alone(compiled_only, tmp_path):
    for file in (compiled_only / "kvcache_dpex" / "spirv").iterdir():
        file.unlink()
    code = (
        "from kvcache_dpex.runtime.compile import package\n"
        "print(len(package.catalogue()), *package.problems())"
    )
    total, problem = run(compiled_only, tmp_path, code).stdout.split(maxsplit=1)
    assert problem == f"{total} of {total} kernels are not packaged with this source and {REASON}\n"


def test_a_zip_file(zipped, tmp_path):
    done = run(zipped, tmp_path)
    assert done.stdout == "packaged True\n[]\n", done.stderr


def test_no_kernel_at_all(compiled_only, tmp_path):
    shutil.rmtree(compiled_only / "kvcache_dpex" / "kernels")
    done = run(
        compiled_only, tmp_path, "from kvcache_dpex.runtime.compile import package; print(package.problems())"
    )
    assert done.stdout == (
        f"['no kernel in {compiled_only}/kvcache_dpex/kernels: "
        "pip install --force-reinstall --no-deps kvcache_dpex']\n"
    )


def test_every_read_names_its_encoding(tmp_path):
    options = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-c", LOAD]
    done = run_python("", arguments=options, KVCACHE_DPEX_CACHE=str(tmp_path), KVCACHE_DPEX_KERNELS=None)
    assert done.stdout == "packaged True\n[]\n", done.stderr
