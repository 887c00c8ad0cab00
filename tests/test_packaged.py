"""The SPIR-V of the package: current everywhere, and what the sources compile to."""

import hashlib
import json
import re
import sys

import pytest

from helpers import compiled
from kvcache_dpex.runtime.compile import compiler, package, spirv, store

CATALOGUE = package.catalogue()
NAMES = ["-".join((function.__name__, *types.values())) for function, types in CATALOGUE]
# What a module may ask of a device. Neither Float64 nor Float16: Iris Xe and Arc have no float64.
ALLOWED = {"Addresses", "Float16Buffer", "Groups", "Int16", "Int64", "Int8", "Kernel", "Linkage", "Vector16"}


def binary(name):
    return (store.PACKAGED / f"{name}.spv").read_bytes()


def test_catalogue_and_folder_hold_the_same_modules():
    names = sorted(store.manifest()["modules"])
    assert names == sorted(NAMES)
    assert sorted(path.name for path in store.PACKAGED.iterdir()) == sorted(
        ["manifest.json", *(f"{name}.spv" for name in names)]
    )
    assert store.manifest()["compiler"] == compiler.VERSION


@pytest.mark.parametrize(("function", "types"), CATALOGUE, ids=NAMES)
def test_every_module_is_current(function, types):
    """The source, types and compiler of today have the manifest's identity, with or without numba-dpex."""
    wanted = store.signature(function, **types)
    entry = store.manifest()["modules"][wanted.name]
    assert entry["identity"] == wanted.identity, "python -m kvcache_dpex kernels build"
    assert tuple(entry["arguments"]) == wanted.arguments
    assert entry["index_space"] == wanted.index_space
    assert entry["in_record"] == wanted.in_record
    assert store.packaged(wanted).binary == binary(wanted.name)


@pytest.mark.parametrize("name", NAMES)
def test_every_module_is_whole_and_modest(name):
    """No float64; the entry point has the module's name, and no extension is needed.

    torch-xpu-ops #1742.
    """
    entry = store.manifest()["modules"][name]
    code = binary(name)
    assert hashlib.sha256(code).hexdigest() == entry["sha256"]
    assert spirv.entry_points(code) == [name.replace("-", "_")]
    assert spirv.extensions(code) == []
    assert spirv.capabilities(code) == entry["capabilities"]
    assert set(entry["capabilities"]) <= ALLOWED


@pytest.mark.skipif(not compiler.available(), reason="compiling needs numba-dpex")
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="other bytecode than that of 3.11 gives other bytes"
)
@pytest.mark.parametrize(("function", "types"), CATALOGUE, ids=NAMES)
def test_every_module_is_what_its_source_compiles_to(function, types):
    module = compiled(function, **types)
    assert module.binary == binary(module.name)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A copy of the packaged modules, to be damaged."""
    for path in store.PACKAGED.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(store, "PACKAGED", tmp_path)
    monkeypatch.setattr(store, "manifest", store.manifest.__wrapped__)
    return tmp_path


def damaged(file, reason):
    message = (
        f"{file} of the package is damaged ({reason}); "
        "reinstall: pip install --force-reinstall --no-deps kvcache_dpex"
    )
    return pytest.raises(RuntimeError, match=f"^{re.escape(message)}$")


def test_a_damaged_package(package):
    function, types = CATALOGUE[-1]
    wanted = store.signature(function, **types)
    file = package / f"{wanted.name}.spv"
    assert store.packaged(wanted).origin == "packaged"
    file.write_bytes(file.read_bytes()[:-4])
    with damaged(file.name, "its SHA-256 differs from the manifest"):
        store.packaged(wanted)
    file.unlink()
    with damaged(file.name, f"[Errno 2] No such file or directory: '{file}'"):
        store.packaged(wanted)
    (package / "manifest.json").write_text('{"modules"')
    with damaged("manifest.json", "Expecting ':' delimiter: line 1 column 11 (char 10)"):
        store.packaged(wanted)


def test_a_module_of_other_source_is_never_taken(package):
    function, types = CATALOGUE[0]
    wanted = store.signature(function, **types)
    manifest = json.loads((package / "manifest.json").read_text())
    manifest["modules"][wanted.name]["identity"] = "0" * 64
    (package / "manifest.json").write_text(json.dumps(manifest))
    assert store.packaged(wanted) is None
    (package / "manifest.json").unlink()
    assert store.packaged(wanted) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda code: code[:-1], "not a SPIR-V module: {size} bytes, starting b'\\x03\\x02#\\x07'"),
        (lambda code: b"\0" + code[1:], "not a SPIR-V module: {size} bytes, starting b'\\x00\\x02#\\x07'"),
        (lambda code: code[:16], "not a SPIR-V module: {size} bytes, starting b'\\x03\\x02#\\x07'"),
        (lambda code: code[:24], "damaged SPIR-V module: instruction at word "),
        (lambda code: code + bytes(4), "damaged SPIR-V module: instruction at word "),
    ],
    ids=["odd length", "magic", "header only", "cut", "zero word"],
)
def test_bytes_that_are_no_module(change, message):
    code = change(binary(NAMES[0]))
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(size=len(code)))}"):
        list(spirv.instructions(code))


def test_a_module_describes_itself():
    function, types = CATALOGUE[-1]
    module = store.packaged(store.signature(function, **types))
    assert repr(module) == (
        f"<kernel {module.name}: {len(module.binary)} bytes of SPIR-V, packaged, "
        f"capabilities {', '.join(spirv.capabilities(module.binary))}>"
    )
