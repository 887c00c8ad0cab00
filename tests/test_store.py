# ruff: noqa: F722, F821  (annotations are the kernel's argument types)
"""Where SPIR-V comes from: what a kernel's identity depends on, and a cache folder that nothing can spoil."""

import importlib.util
import itertools
import re
import subprocess
import sys

import pytest

from kvcache_dpex.runtime.compile import compiler, store

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


def test_identity_follows_types_compiler_and_device_functions(tmp_path, monkeypatch):
    plain = identity(SOURCE, tmp_path)
    assert identity(SOURCE, tmp_path) == plain
    assert identity(SOURCE, tmp_path, word="uint32") != plain
    fingerprint = compiler.fingerprint()
    monkeypatch.setattr(compiler, "fingerprint", lambda: fingerprint + " patched")
    assert identity(SOURCE, tmp_path) != plain


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
    """A compiler that counts, a cache folder of its own, and a fresh memory of what was loaded."""
    calls = []

    def compile_kernel(function, *rest):
        calls.append(function.__name__)
        return b"SPIR-V of " + function.__name__.encode()

    monkeypatch.setattr(compiler, "available", lambda: True)
    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "load", store.load.__wrapped__)
    return calls


def test_a_compiled_module_is_cached(compilations, tmp_path):
    first = store.load(double, word="uint32")
    second = store.load(double, word="uint32")
    assert (first.origin, second.origin, compilations) == ("compiled", "cache", ["double"])
    assert first.binary == second.binary == b"SPIR-V of double"
    assert first._replace(origin="cache") == second
    assert store.load(double, word="uint64").origin == "compiled"
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [re.sub("[0-9a-f]{16}", "*", name) for name in names] == [
        "double-uint32-*.spv",
        "double-uint64-*.spv",
    ]


@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[:-1], lambda whole: b"", lambda whole: b"x" + whole[1:], lambda whole: whole + b"x"],
    ids=["truncated", "empty", "changed", "longer"],
)
def test_a_damaged_cache_file_is_rebuilt(compilations, tmp_path, damage):
    store.load(double, word="uint32")
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert store.load(double, word="uint32").origin == "compiled"
    assert path.read_bytes() == whole
    assert store.load(double, word="uint32").origin == "cache"
    assert compilations == ["double", "double"]


def test_a_cache_folder_that_cannot_be_written(compilations, monkeypatch, tmp_path):
    """Its parent is a file: nothing is cached, and nothing fails."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert store.load(double, word="uint32").origin == "compiled"
    assert compilations == ["double", "double"]


def test_compiling_on_demand_skips_the_package_and_the_cache(compilations, monkeypatch):
    from kvcache_dpex.kernels.scatter_gpu import scatter_gpu

    assert store.load(scatter_gpu, slot="int32").origin == "packaged"
    monkeypatch.setenv("KVCACHE_DPEX_KERNELS", "compile")
    for _ in range(2):
        assert store.load(scatter_gpu, slot="int32").origin == "compiled"
    assert compilations == ["scatter_gpu", "scatter_gpu"]


def test_the_cache_folder_by_default(monkeypatch):
    monkeypatch.delenv("KVCACHE_DPEX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(store.cache_folder()) == "/somewhere/kvcache_dpex"


def test_without_a_compiler(compilations, monkeypatch):
    monkeypatch.setattr(compiler, "available", lambda: False)
    message = (
        "kernel double-uint32 is not in the package with this source and these types, and compiling "
        "it needs numba-dpex: pip install 'kvcache_dpex[jit]' (Python 3.9 to 3.11)"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        store.load(double, word="uint32")


@pytest.mark.parametrize("edited", ["if at < size:", "x + np.float32(1.0)"], ids=["kernel", "helper"])
def test_an_edit_after_the_import_is_noticed(compilations, tmp_path, edited):
    """The running process holds the old kernel: neither may its SPIR-V be stored as the new source's, nor may
    a stored module of the new source be launched by the old host code.
    """
    module = module_of(SOURCE, tmp_path)
    path = next(tmp_path.glob("made_up_*.py"))
    path.write_text(SOURCE.replace(edited, edited.replace("size", "1").replace("1.0", "5.0")))
    name = "kernel" if "size" in edited else "inner"
    message = f"the source of {name} was edited after it was imported; start Python anew"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        store.load(module.kernel, word="float32")
    assert compilations == []
    newer = module_of(path.read_text(), tmp_path)
    assert store.load(newer.kernel, word="float32").origin == "compiled"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        store.load(module.kernel, word="float32")
    path.write_text("# Moved down.\n\n" + SOURCE)
    assert store.load(module_of(SOURCE, tmp_path).kernel, word="float32").origin == "compiled"


WRITER = """
from pathlib import Path
from kvcache_dpex.runtime.compile import store
for turn in range(150):
    store._write_atomically(Path({path!r}), store._sealed(bytes([turn % 256]) * 100_000))
"""


def test_two_processes_at_once(tmp_path):
    """Two writers of one file and a reader: what is read is always whole, and no other file is left."""
    path = tmp_path / "cache" / "module.spv"
    code = WRITER.format(path=str(path))
    writers = [
        subprocess.Popen([sys.executable, "-c", code], cwd=store._KERNELS.parent.parent) for _ in range(2)
    ]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            sealed = path.read_bytes()
            assert sealed == store._sealed(sealed[:-32])
            seen.add(sealed[0])
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(seen) > 1
    assert list(path.parent.iterdir()) == [path]
