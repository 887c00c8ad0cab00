# ruff: noqa: F722, F821  (annotations are the kernel's argument types)
"""Where SPIR-V comes from: what a kernel's identity depends on, and what is compiled when."""

import importlib.util
import itertools
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import indent

import pytest

from helpers import output_of, tiny_module
from kvcache_dpex.runtime.compile import compiler, edits, elsewhere, package, store

_numbers = itertools.count()
SOURCE = """
import numpy as np

FACTOR = np.float32(2.0)
UNUSED = 1


def inner(x):
    return x + np.float32(1.0)


def helper(x):
    return inner(x) * FACTOR


def kernel(item: "item[1]", data: "word*", size: "int64"):
    at = item.get_id(0)
    if at < size:
        data[at] = helper(data[at])


def unused(x):
    return x
"""


def module_of(text, folder, name="made_up"):
    """A module with this text, from a file of its own."""
    path = folder / f"{name}_{next(_numbers)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def identity(text, folder, word="float32"):
    return store.signature(module_of(text, folder).kernel, word=word).identity


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if at < size:", "if at <= size:"),
        ("inner(x) * FACTOR", "inner(x) / FACTOR"),
        ("x + np.float32(1.0)", "x + np.float32(1.5)"),
        ("FACTOR = np.float32(2.0)", "FACTOR = np.float32(3.0)"),
        ("FACTOR = np.float32(2.0)", "FACTOR = np.float64(2.0)"),
        ("FACTOR = np.float32(2.0)", "FACTOR = 2.0"),
        ('size: "int64"', 'size: "int32"'),
        ('data: "word*"', 'data: "uint32*"'),
        ('item: "item[1]"', 'item: "item[2]"'),
        ('item: "item[1]"', 'item: "nditem[1]"'),
        ("UNUSED = 1", "IN_RECORD = True"),
    ],
    ids=[
        "kernel",
        "helper",
        "helper of a helper",
        "constant",
        "constant's type",
        "a Python float",
        "scalar type",
        "pointer type",
        "axes",
        "index space",
        "one argument for all",
    ],
)
def test_what_changes_a_kernel_changes_its_identity(tmp_path, old, new):
    assert old in SOURCE
    assert identity(SOURCE.replace(old, new), tmp_path) != identity(SOURCE, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("UNUSED = 1", "UNUSED = 2"),
        ("    return x\n", "    return -x\n"),
        ("\nimport", "\n\n\n# Moved.\nimport"),
    ],
    ids=["constant", "function", "place in the file"],
)
def test_what_a_kernel_does_not_use_leaves_its_identity(tmp_path, old, new):
    before, _, after = SOURCE.rpartition(old)
    assert identity(before + new + after, tmp_path) == identity(SOURCE, tmp_path)


def test_the_identity_of_a_kernel_that_a_function_makes(tmp_path):
    def made(text):
        return identity(
            f"def make():\n{indent(text, '    ')}\n    return kernel\n\nkernel = make()", tmp_path
        )

    assert made(SOURCE) == made(SOURCE.replace("UNUSED = 1", "UNUSED = 2"))
    assert len({made(SOURCE.replace(*edit)) for edit in (("", ""), ("<", "<="), ("(1.0)", "(1.5)"))}) == 3


def test_identity_follows_types_compiler_and_device_functions(tmp_path, monkeypatch):
    plain = identity(SOURCE, tmp_path)
    assert identity(SOURCE, tmp_path) == plain
    assert identity(SOURCE, tmp_path, word="uint32") != plain
    fingerprint = compiler.fingerprint()
    monkeypatch.setattr(compiler, "fingerprint", lambda: fingerprint + " patched")
    assert identity(SOURCE, tmp_path) != plain


def test_identity_follows_a_table(tmp_path):
    """A kernel chooses a codec by its name: keys count, and which of the functions each of them names."""
    text = SOURCE.replace("helper(data[at])", "TABLE[KEY](data[at])") + "\n\nKEY = 'b'\nTABLE = "
    tables = "{'a': helper}", "{'a': helper, 'b': helper}", "{'a': helper, 'b': inner}"
    tables += ("{'a': helper, 'b': inner, 'c': inner}", "{'a': helper, 'b': inner, 'c': helper}")
    assert len({identity(text + table, tmp_path) for table in tables}) == len(tables)


@pytest.mark.parametrize("name", ["compiler", "lowering", "lowering_views", "parameters", "phis"])
def test_the_fingerprint_holds_every_file_that_compiles(name):
    """An edit of any of them may change the SPIR-V of every kernel."""
    assert Path(compiler.__file__).with_name(f"{name}.py").read_text() in compiler.fingerprint()


def test_identity_follows_the_packages_own_modules(tmp_path):
    """`device.load(...)` names a function of a module: the whole module counts."""
    text = SOURCE.replace("helper(data[at])", "device.load(data, at)")
    found = set()
    for body in ("pointer[index]", "-pointer[index]", "pointer[index]"):
        device = module_of(
            f"def load(pointer, index):\n    return {body}\n", tmp_path, "kvcache_dpex.kernels.d"
        )
        sys.modules[device.__name__] = device
        try:
            module = module_of(text, tmp_path)
            module.device = device
            found.add(store.signature(module.kernel, word="float32").identity)
        finally:
            del sys.modules[device.__name__]
    assert len(found) == 2


def double(item: "item[1]", data: "word*"):
    data[item.get_id(0)] *= 2


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """A compiler that counts, and a cache folder of its own."""
    calls = []

    def compile_kernel(function, index_space, arguments, entry, *rest):
        calls.append(function.__name__)
        return tiny_module(entry)

    monkeypatch.setattr(compiler, "available", lambda: True)
    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path / "cache"))
    edits.forget()
    yield calls
    edits.forget()


def load(function, **types):
    """As a new process would."""
    edits.forget()
    return store.load(function, **types)


def test_a_compiled_module_is_cached(compilations, tmp_path):
    first = load(double, word="uint32")
    second = load(double, word="uint32")
    assert (first.origin, second.origin, compilations) == ("compiled", "cache", ["double"])
    assert first.binary == second.binary == tiny_module("double_uint32")
    assert first._replace(origin="cache") == second
    assert load(double, word="uint64").origin == "compiled"
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [re.sub("[0-9a-f]{16}", "*", name) for name in names] == [
        "double-uint32-*.spv",
        "double-uint64-*.spv",
    ]


def test_a_loaded_module_is_kept(compilations):
    assert store.load(double, word="uint32") is store.load(double, word="uint32")
    assert compilations == ["double"]


def test_threads_compile_a_kernel_once(compilations, monkeypatch, tmp_path):
    """Without a usable cache folder, only the lock keeps four threads from compiling four times."""
    (tmp_path / "cache").write_text("")
    quick, together = compiler.compile_kernel, threading.Barrier(4)

    def slow(*arguments):
        time.sleep(0.2)
        return quick(*arguments)

    def work(_):
        together.wait()
        return store.load(double, word="uint32")

    monkeypatch.setattr(compiler, "compile_kernel", slow)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, pool.map(work, range(4))))) == 1
    assert compilations == ["double"]


LOAD = """
import time
from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
from kvcache_dpex.runtime.compile import compiler, store

def slow(*arguments):
    time.sleep(1)
    return bytes.fromhex({module!r})

compiler.available = lambda: True
compiler.compile_kernel = slow
store.packaged = lambda wanted: None
print(store.load(scatter_gpu, slot="int64").origin)
"""


def test_processes_compile_a_kernel_once(tmp_path):
    code = LOAD.format(module=tiny_module("scatter_gpu_int64").hex())
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(
                output_of, code, KVCACHE_DPEX_CACHE=str(tmp_path / "cache"), KVCACHE_DPEX_KERNELS=None
            )
            for _ in range(4)
        ]
    assert sorted(run.result() for run in runs) == ["cache", "cache", "cache", "compiled"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_compiling_on_demand_skips_the_package_and_the_cache(compilations, monkeypatch):
    from kvcache_dpex.kernels.scatter_gpu import scatter_gpu

    assert load(scatter_gpu, slot="int32").origin == "packaged"
    monkeypatch.setenv("KVCACHE_DPEX_KERNELS", "compile")
    for _ in range(2):
        assert load(scatter_gpu, slot="int32").origin == "compiled"
    assert compilations == ["scatter_gpu", "scatter_gpu"]


def test_without_a_compiler(compilations, monkeypatch):
    monkeypatch.setattr(compiler, "available", lambda: False)
    message = (
        "kernel double-uint32 is not in the package with this source and these types, and compiling it needs "
        f"numba-dpex: {elsewhere.REMEDY}"
    )
    assert elsewhere.REMEDY == (
        "pip install 'kvcache_dpex[jit]' (Python 3.9 to 3.11), or `python -m kvcache_dpex kernels compiler`, "
        "which installs it beside this Python, or set KVCACHE_DPEX_COMPILER to a Python that has it"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        store.load(double, word="uint32")


def test_problems(compilations, monkeypatch, tmp_path):
    """What doctor shows: nothing here; kernels that are missing; none at all."""
    assert package.problems() == []
    monkeypatch.setattr(store, "packaged", lambda wanted: None)
    assert package.problems() == []
    monkeypatch.setattr(compiler, "available", lambda: False)
    total = len(package.catalogue())
    (problem,) = package.problems()
    assert problem.startswith(f"{total} of {total} kernels are not packaged with this source, and compiling")
    monkeypatch.setenv("KVCACHE_DPEX_COMPILER", str(tmp_path / "nothing"))
    (problem,) = package.problems()
    assert problem.startswith("KVCACHE_DPEX_COMPILER must name a Python that has numba-dpex, got ")
    monkeypatch.setattr(package, "catalogue", list)
    (problem,) = package.problems()
    assert problem == f"no kernel in {package._KERNELS}: {store.REINSTALL}"
