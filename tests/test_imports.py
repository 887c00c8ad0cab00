"""Who may import whom, read from the source; and what a fresh interpreter loads."""

import ast
from pathlib import Path

import pytest

import kvcache_dpex
from helpers import output_of, run_python

PACKAGE = Path(kvcache_dpex.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# What each room, or a file of a room, may import of the package; a file's own line holds before its room's.
MAY_IMPORT = {
    "layout.py": (),
    "kernels": ("kernels",),
    "reference": ("reference", "layout"),
    "runtime/__init__.py": (),
    "runtime/environment": ("runtime/environment",),
    "runtime/compile": ("runtime/compile", "runtime/environment"),
    "runtime/compile/package.py": ("runtime/compile", "kernels"),
    "runtime/compile/lowering.py": ("runtime/compile", "kernels"),
    "runtime/compile/lowering_views.py": ("runtime/compile", "kernels"),
    "runtime/compile/simulate.py": ("runtime/compile", "kernels"),
    "runtime/launch": ("runtime/launch", "runtime/compile", "runtime/environment"),
    "formats.py": (),
    "ops": ("ops", "runtime", "layout", "formats", "kernels"),
    "blocks": ("blocks", "ops", "runtime", "layout", "formats"),
    "dispatch.py": ("ops", "runtime", "layout"),
    "torch.py": ("dispatch", "blocks", "ops", "runtime", "layout", "formats", "torch_blocks", "torch_flash"),
    "torch_blocks.py": ("dispatch", "ops"),
    "torch_flash.py": ("dispatch",),
    "distributed.py": ("torch",),
    "vllm": ("torch", "formats"),
    "transformers": ("transformers", "torch", "formats", "blocks", "layout"),
    "commands": ("", "commands", "ops", "runtime", "layout", "formats", "reference"),
    "__main__.py": ("", "commands"),
    "__init__.py": ("blocks", "ops", "runtime"),
}

LOWERING = "runtime/compile/lowering.py", "runtime/compile/lowering_views.py"
# Which files may import these packages at all.
ONLY_IN = {
    "numba_dpex": ("runtime/compile/compiler.py",),
    "numba": ("runtime/compile/compiler.py", *LOWERING),
    "llvmlite": ("runtime/compile/compiler.py", *LOWERING),
    "ctypes": (
        "runtime/launch/arguments.py",
        "runtime/launch/interface.py",
        "runtime/launch/launch.py",
        "runtime/launch/order.py",
        "runtime/launch/usm_state.py",
        "runtime/environment/bundle.py",
    ),
    "torch": (
        "torch.py",
        "torch_blocks.py",
        "torch_flash.py",
        "distributed.py",
        "vllm/backend.py",
        "transformers/attention.py",
        "transformers/batching.py",
        "transformers/static.py",
        "transformers/cache.py",
        "transformers/tables.py",
        "dispatch.py",
        "runtime/launch/exchange.py",
        "runtime/launch/tensors.py",
        "runtime/launch/xpu.py",
    ),
    "vllm": ("vllm/__init__.py", "vllm/backend.py"),
    "dpnp": ("runtime/launch/arrays.py", "runtime/launch/exchange.py", "commands/check.py"),
}

# A kernel file is read, hashed and simulated anywhere.
IN_KERNELS = {"numpy", "threading"}


def imports(file):
    """(module, whether it is of the package, whether it is imported with the file) for each import."""
    found = []

    def visit(node, eager):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, False, eager) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                within = child.level > 0
                base = [*file.parent.parts][: len(file.parent.parts) - child.level + 1] if within else []
                module = ".".join([*base, *(child.module or "").split(".")]).strip(".")
                if within and child.module is None:
                    found.extend((f"{module}.{alias.name}".strip("."), True, eager) for alias in child.names)
                else:
                    found.append((module, within, eager))
            else:
                checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
                lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                visit(child, eager and not lazy and not checking)

    visit(ast.parse((PACKAGE / file).read_text()), True)
    return found


def rule_of(file):
    """The table's line for a file: its own, else that of the innermost room."""
    places = (file.as_posix(), *(parent.as_posix() for parent in file.parents))
    return next((MAY_IMPORT[place] for place in places if place in MAY_IMPORT), None)


def is_allowed(module, allowed):
    """Whether a module of the package, such as runtime.launch.arrays, is a room or in one."""
    path = module.replace(".", "/")
    known = (PACKAGE / path.split("/")[0]).is_dir() or (PACKAGE / f"{path.split('/')[0]}.py").exists()
    place = path if known else ""
    return any(
        place in (room, room.removesuffix(".py")) or (room and place.startswith(f"{room}/"))
        for room in allowed
    )


@pytest.mark.parametrize("file", FILES, ids=str)
def test_rooms_import_downwards_only(file):
    allowed = rule_of(file)
    assert allowed is not None, f"{file} is in no room of this test's table"
    for module, within, _ in imports(file):
        assert not module.startswith("kvcache_dpex"), "inside the package, imports are relative"
        if within:
            assert is_allowed(module, allowed), f"{file} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_heavy_packages_have_one_door_each(file):
    for module, within, _ in imports(file):
        package = module.split(".")[0]
        if not within and package in ONLY_IN:
            assert file.as_posix() in ONLY_IN[package], f"{file} imports {module}"


@pytest.mark.parametrize("file", [file for file in FILES if file.parts[0] == "kernels"], ids=str)
def test_kernel_files_import_numpy_at_most(file):
    assert {module for module, within, _ in imports(file) if not within} <= IN_KERNELS


@pytest.mark.parametrize("file", FILES, ids=str)
def test_device_packages_are_imported_when_they_are_needed(file):
    """At the top of a file they would load with it; some files exist only for numba or torch."""
    here = {*LOWERING, *ONLY_IN["torch"]}
    eager = {module.split(".")[0] for module, within, now in imports(file) if now and not within}
    if file.as_posix() not in here:
        assert not eager & {"dpctl", "dpnp", "numba", "numba_dpex", "torch"}


def test_the_reader_of_imports_reads_them_all():
    """Guards the tests above: known imports of every kind are found, with the right room."""
    assert ("runtime.environment", True, True) in imports(Path("runtime/launch/launch.py"))
    assert ("runtime.compile.store", True, True) in imports(Path("runtime/launch/launch.py"))
    assert ("kernels.scatter_gpu", True, True) in imports(Path("ops/write.py"))
    assert ("dpctl", False, False) in imports(Path("runtime/environment/devices.py"))
    assert ("numba_dpex", False, False) in imports(Path("runtime/compile/compiler.py"))
    assert ("ops.allocate", True, False) in imports(Path("__init__.py"))


BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(name + " is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""


def blocking(*packages):
    return BLOCK.format(blocked=set(packages))


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, kvcache_dpex; print(sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(ast.literal_eval(output_of(code)))
    heavy = {"dpnp", "dpctl", "numba", "numba_dpex", "torch", "numpy", "rich", "platformdirs", "llvmlite"}
    assert "kvcache_dpex" in loaded
    assert not loaded & heavy


def test_importing_the_package_needs_nothing():
    code = blocking("dpctl", "dpnp", "numba", "numba_dpex", "torch", "numpy")
    code += "import kvcache_dpex; print(kvcache_dpex.__version__, dir(kvcache_dpex))"
    assert output_of(code).startswith(f"{kvcache_dpex.__version__} ['")


def test_every_public_name_resolves_with_torch_and_numba_dpex_blocked():
    code = blocking("torch", "numba", "numba_dpex") + (
        "import kvcache_dpex\n"
        "for name in kvcache_dpex.__all__:\n"
        "    assert callable(getattr(kvcache_dpex, name)), name\n"
        "caches = kvcache_dpex.empty_cache(2, 4, 1, 8)\n"
        "key = caches[0][0] + 1\n"
        "import dpnp\n"
        "slots = dpnp.asarray([3, -1, 6, 0], sycl_queue=key.sycl_queue)\n"
        "kvcache_dpex.reshape_and_cache(key, key, *caches, slots)\n"
        "print(int(caches[0].sum()))\n"
    )
    assert output_of(code) == "24"


MODULES = ["layout", "reference", "torch"]


def test_what_completion_offers():
    """The public names and the public submodules, and nothing that the file imports for itself."""
    offered = [name for name in dir(kvcache_dpex) if not name.startswith("__")]
    assert offered == sorted([*kvcache_dpex.__all__, *MODULES])
    assert "__version__" in dir(kvcache_dpex)


@pytest.mark.parametrize("name", MODULES)
def test_submodules_are_loaded_when_they_are_used(name):
    if name == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    code = (
        f"import sys, kvcache_dpex as kv; before = 'kvcache_dpex.{name}' in sys.modules\n"
        f"print(before, kv.{name} is sys.modules['kvcache_dpex.{name}'])"
    )
    assert output_of(code) == "False True"


def test_the_torch_module_without_torch():
    """An error with the remedy, of the kind that hasattr and help() expect."""
    done = run_python(
        blocking_import("torch")
        + "import kvcache_dpex, pydoc\n"
        + "print(hasattr(kvcache_dpex, 'torch'), 'empty_cache' in pydoc.render_doc(kvcache_dpex))\n"
        + "kvcache_dpex.torch"
    )
    assert done.stdout == "False True\n"
    assert done.stderr.splitlines()[-1] == (
        "AttributeError: kvcache_dpex.torch needs torch, which is not installed: pip install torch"
    )
    assert "During handling" not in done.stderr


def blocking_import(name):
    """As where it is not installed."""
    return f"import sys; sys.modules[{name!r}] = None\n"


def test_unknown_names_are_said_to_be_unknown():
    with pytest.raises(AttributeError, match=r"^module 'kvcache_dpex' has no attribute 'page_size'$"):
        kvcache_dpex.page_size  # noqa: B018
    assert set(kvcache_dpex.__all__) <= set(dir(kvcache_dpex))
    assert kvcache_dpex.__all__ == sorted(kvcache_dpex.__all__)


@pytest.mark.parametrize(
    ("blocked", "error"),
    [
        (
            "dpctl",
            "ImportError: kvcache_dpex needs dpctl and its SYCL runtime (dpctl is blocked): "
            "pip install dpctl dpnp",
        ),
        ("dpnp", "ImportError: arrays of kvcache_dpex are dpnp arrays (dpnp is blocked): pip install dpnp"),
    ],
)
def test_the_first_use_says_what_is_missing(blocked, error):
    done = run_python(blocking(blocked) + "import kvcache_dpex\nkvcache_dpex.empty_cache(2, 4, 1, 8)")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == error
