# ruff: noqa: F722, F821  (annotations are the kernel's argument types)
"""A compiler in another Python: bit for bit what this one compiles, and errors that name the remedy."""

import os
import re
import sys
import textwrap

import pytest

from helpers import ROOT, output_of
from kvcache_dpex.kernels.quantize_cpu import quantize_cpu
from kvcache_dpex.kernels.scatter_cpu import scatter_cpu
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.runtime.compile import compiler, edits, elsewhere, store

# In an environment without numba-dpex the developer names a Python that has it.
COMPILER = os.environ.get(elsewhere.VARIABLE) or (sys.executable if compiler.available() else None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason=f"{elsewhere.VARIABLE} names no Python")
TYPES = [
    (scatter_gpu, {"slot": "int32"}),
    (scatter_cpu, {"slot": "int64"}),
    (quantize_cpu, {"value": "bfloat16", "code": "float8_e4m3fn", "slot": "int64"}),
]


def expected(function, wanted):
    """What COMPILER's version of Python makes of a kernel: bytecode differs from version to version."""
    if compiler.available() and os.path.samefile(COMPILER, sys.executable):
        return store.compile_here(function, wanted)
    return store.packaged(wanted).binary


@needs_compiler
@pytest.mark.parametrize(("function", "types"), TYPES, ids=[function.__name__ for function, _ in TYPES])
def test_the_bits_of_another_python_are_those_of_the_package(function, types):
    """`test_packaged` compares the package with what is compiled in process."""
    wanted = store.signature(function, **types)
    assert elsewhere.compile_kernel(COMPILER, function, wanted) == expected(function, wanted)


@needs_compiler
def test_what_misleads_another_python(monkeypatch, tmp_path):
    """Its packages, drivers and settings are its own: NUMBA_DPEX_OPT, PYTHONPATH, OCL_ICD_FILENAMES."""
    wanted = store.signature(scatter_gpu, slot="int64")
    bits = expected(scatter_gpu, wanted)
    (tmp_path / "numpy.py").write_text("raise ImportError('of another Python')")
    for name, value in [
        ("PYTHONPATH", str(tmp_path)),
        ("PYTHONHOME", str(tmp_path)),
        ("OCL_ICD_FILENAMES", str(tmp_path / "libintelocl.so")),
        ("NUMBA_DPEX_OPT", "0"),
        ("NUMBA_DEBUG", "1"),
    ]:
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/another/python")
    assert elsewhere.compile_kernel(COMPILER, scatter_gpu, wanted) == bits


@needs_compiler
def test_an_edit_between_import_and_compilation(monkeypatch):
    """The other Python reads the files as they are: another identity is no answer."""
    wanted = store.signature(scatter_gpu, slot="int64")._replace(identity="0" * 64)
    message = (
        f"{COMPILER} could not compile kernel scatter_gpu-int64: "
        f"RuntimeError: its source was edited after it "
        "was imported: restart Python"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        elsewhere.compile_kernel(COMPILER, scatter_gpu, wanted)


USER = """
print("printed while it is imported")

def add_one(item: "item[1]", data: "uint32*"):
    data[item.get_id(0)] += 1
"""
USE = """
    import importlib.util, sys
    spec = importlib.util.spec_from_file_location("of_a_user", {file!r})
    sys.modules["of_a_user"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from kvcache_dpex.runtime.compile import spirv, store
    module = store.load(module.add_one)
    print(module.origin, spirv.entry_points(module.binary))
"""


@needs_compiler
def test_a_kernel_of_a_user(tmp_path):
    """It is in a file outside the package, which may print."""
    file = tmp_path / "of_a_user.py"
    file.write_text(USER)
    variables = {"KVCACHE_DPEX_CACHE": str(tmp_path / "cache"), "KVCACHE_DPEX_COMPILER": COMPILER}
    code = textwrap.dedent(USE.format(file=str(file)))
    for origin in ("compiled", "cache"):
        assert output_of(code, **variables).splitlines()[1] == f"{origin} ['add_one']"


def test_a_kernel_of_a_script_or_a_cell(monkeypatch):
    """Another Python cannot import it, and must not run the script."""

    def kernel(item: "item[1]", data: "uint32*"):
        pass

    kernel.__module__ = "__main__"
    message = (
        "a kernel that another Python compiles must be in a module of its own, got kernel of "
        f"{__file__}; in a Python with numba-dpex it can be anywhere"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        elsewhere.compile_kernel(sys.executable, kernel, store.signature(kernel))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 3", "exit status 3"),
        ("echo no module", "exit status 0"),
        ("echo first >&2; echo last >&2; exit 1", "last"),
        (f"cat '{store.PACKAGED}/scatter_gpu-int64.spv'; exit 4", "exit status 4"),
    ],
)
def test_a_compiler_that_fails(tmp_path, script, said):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    wanted = store.signature(scatter_gpu, slot="int64")
    message = f"{program} could not compile kernel scatter_gpu-int64: {said}"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        elsewhere.compile_kernel(str(program), scatter_gpu, wanted)


@pytest.mark.skipif(compiler.available(), reason="needs a Python without numba-dpex, such as this one")
def test_a_python_without_numba_dpex():
    wanted = store.signature(scatter_gpu, slot="int64")
    message = f"ImportError: numba-dpex is not installed there: {elsewhere.REMEDY}"
    with pytest.raises(RuntimeError, match=f"{re.escape(message)}$"):
        elsewhere.compile_kernel(sys.executable, scatter_gpu, wanted)


def test_a_variable_that_names_no_program(monkeypatch, tmp_path):
    monkeypatch.setenv(elsewhere.VARIABLE, str(tmp_path))
    message = (
        f"KVCACHE_DPEX_COMPILER must name a Python that has numba-dpex, got '{tmp_path}', which is no program"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        elsewhere.named()
    monkeypatch.setenv(elsewhere.VARIABLE, "sh")
    assert elsewhere.named() == os.path.abspath(elsewhere.named())
    monkeypatch.setenv(elsewhere.VARIABLE, "")
    assert elsewhere.named() is None


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """Which Python compiles; None is this process."""
    found = []
    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "compile_here", lambda *arguments: found.append(None))
    monkeypatch.setattr(elsewhere, "compile_kernel", lambda python, *rest: found.append(python))
    return found


def made_python(folder):
    """What `install` leaves, without its packages."""
    python = folder / "compiler" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return str(python)


@pytest.mark.parametrize("available", [True, False])
def test_which_python_compiles(chosen, monkeypatch, tmp_path, available):
    """The one that is named, else this one if it can, else the one that was installed."""
    monkeypatch.setattr(compiler, "available", lambda: available)
    python = made_python(tmp_path / "cache")
    wanted = store.signature(scatter_gpu, slot="int64")
    store.compile_signature(scatter_gpu, wanted)
    monkeypatch.setenv(elsewhere.VARIABLE, "sh")
    store.compile_signature(scatter_gpu, wanted)
    assert chosen == [None if available else python, elsewhere.named()]


def test_a_module_that_was_imported_again_is_compiled_by_a_fresh_process(chosen, monkeypatch):
    monkeypatch.setattr(compiler, "available", lambda: True)
    monkeypatch.setattr(edits, "reimported", {"kvcache_dpex.kernels.scatter_gpu"})
    store.compile_signature(scatter_gpu, store.signature(scatter_gpu, slot="int64"))
    store.compile_signature(scatter_cpu, store.signature(scatter_cpu, slot="int64"))
    assert chosen == [sys.executable, None]


def test_an_installed_compiler_that_others_may_change(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path / "cache"))
    assert elsewhere.installed() is None
    python = made_python(tmp_path / "cache")
    assert elsewhere.installed() == python
    (tmp_path / "cache").chmod(0o777)
    assert elsewhere.installed() is None


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """What `install` runs, instead of running it."""
    run = []

    def succeed(command):
        run.append(command)
        made_python(tmp_path / "cache") if "venv" in command else None

    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(elsewhere, "_succeed", succeed)
    monkeypatch.setattr(elsewhere, "_base_python", lambda: "python3.10")
    return run


def test_install(commands, tmp_path):
    python = elsewhere.install()
    assert python == elsewhere.installed() == str(tmp_path / "cache" / "compiler" / "bin" / "python")
    venv, pip = commands
    assert venv == ["python3.10", "-m", "venv", str(tmp_path / "cache" / "compiler")]
    assert pip[:2] == [python, "-m"]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^jit = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1]
    pinned = re.findall(r'^    "([^";]+)', extra, re.MULTILINE)
    assert len(pinned) > 5
    assert sorted(pip[-len(pinned) :]) == sorted(pinned)


def test_an_install_that_fails_leaves_nothing(commands, monkeypatch, tmp_path):
    succeed = elsewhere._succeed

    def fail(command):
        if "pip" in command:
            raise RuntimeError("no network")
        succeed(command)

    monkeypatch.setattr(elsewhere, "_succeed", fail)
    with pytest.raises(RuntimeError, match="no network"):
        elsewhere.install()
    assert elsewhere.installed() is None
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_command_that_fails_says_why():
    command = ["sh", "-c", "echo a; echo b >&2; echo c >&2; exit 1"]
    with pytest.raises(RuntimeError, match=r"^sh -c .* failed: b c$"):
        elsewhere._succeed(command)


@pytest.mark.parametrize("place", ["path", "pyenv"])
def test_a_python_to_install_into(monkeypatch, tmp_path, place):
    """On PATH or in pyenv's folder; one that does not start, or is another version, is passed over."""

    def program(path, version):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.setattr(sys, "executable", program(tmp_path / "own" / "python", "3.13"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    with pytest.raises(
        RuntimeError, match=r"^numba-dpex needs Python 3\.9, 3\.10 or 3\.11, and none is on PATH"
    ):
        elsewhere._base_python()
    program(tmp_path / "bin" / "python3.11", "'pyenv: not installed'")
    right = {"path": tmp_path / "bin" / "python3.10", "pyenv": tmp_path / "pyenv/versions/3.10.13/bin/python"}
    found = program(right[place], "3.10")
    assert elsewhere._base_python() == found
    monkeypatch.setattr(sys, "executable", program(tmp_path / "own" / "python", "3.9"))
    assert elsewhere._base_python() == sys.executable
