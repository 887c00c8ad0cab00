"""When the edit of a kernel takes effect: the next process, an import of the module anew, never by halves."""

import importlib.util
import os
import shutil
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import ROOT, run_python
from kvcache_dpex.runtime.compile import compiler, edits, source

# A Python with numba-dpex; see tests/test_elsewhere.py.
COMPILER = os.environ.get("KVCACHE_DPEX_COMPILER") or (sys.executable if compiler.available() else None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="KVCACHE_DPEX_COMPILER names no Python")

PREPARE = textwrap.dedent("""
    import importlib, sys
    from pathlib import Path
    import numpy as np
    import kvcache_dpex as kv
    from kvcache_dpex.ops import write
    from kvcache_dpex.runtime.environment import devices
    from kvcache_dpex.runtime.launch import arrays

    FOLDER = Path(kv.__file__).parent / "kernels"
    queue = devices.queue_for()
    tensor = arrays.tensor_module()

    def call(blocks=2, slot="int64"):
        key = tensor.asarray(np.arange(1, 4, dtype="float32").reshape(3, 1, 1), sycl_queue=queue)
        caches = [tensor.zeros((blocks, 2, 1, 1), dtype="float32", sycl_queue=queue) for _ in range(2)]
        slots = tensor.asarray(np.array([3, 0, 1], slot), sycl_queue=queue)
        try:
            write.reshape_and_cache(key, key, *caches, slots)
        except (ImportError, RuntimeError) as error:
            print(type(error).__name__, error)
        else:
            print(arrays.to_numpy(caches[0]).ravel().tolist()[:4])

    def edit(name="scatter_strided", old="if 0 <= slot < num_slots:", new="if 0 < slot < num_slots:"):
        file = FOLDER / f"{name}.py"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
""")
BEFORE, AFTER = "[2.0, 3.0, 0.0, 1.0]", "[0.0, 3.0, 0.0, 1.0]"


@pytest.fixture
def own_copy(tmp_path):
    """A copy of the package whose kernels a test may edit."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvcache_dpex", tmp_path / "kvcache_dpex", ignore=ignored)
    return tmp_path


def run(folder, code, compiler=COMPILER):
    """Lines that code prints, with a copy of the package and a cache folder beside it."""
    variables = {"KVCACHE_DPEX_CACHE": str(folder / "cache"), "KVCACHE_DPEX_KERNELS": None}
    done = run_python(
        PREPARE + textwrap.dedent(code), path=folder, KVCACHE_DPEX_COMPILER=compiler, **variables
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


ORIGIN = """
    from kvcache_dpex.kernels.scatter_strided import scatter_strided
    from kvcache_dpex.runtime.compile import store
    call()
    print(store.load(scatter_strided, word="uint32", slot="int64").origin)
"""


@needs_compiler
def test_an_edit_takes_effect_in_the_next_process(own_copy):
    """No further step: the packaged module no longer fits the source, so it is compiled, once, by four."""
    assert run(own_copy, ORIGIN) == [BEFORE, "packaged"]
    assert run(own_copy, "edit()") == []
    with ThreadPoolExecutor(4) as pool:
        found = sorted(pool.map(lambda _: run(own_copy, ORIGIN), range(4)))
    assert found == [[AFTER, "cache"]] * 3 + [[AFTER, "compiled"]]
    assert len(list((own_copy / "cache").iterdir())) == 1


@pytest.mark.skipif(compiler.available(), reason="numba-dpex is installed and compiles the edited kernel")
def test_an_edit_without_a_compiler_is_an_error(own_copy):
    """The packaged module of the old source must not run in its place."""
    run(own_copy, "edit()")
    (line,) = run(own_copy, "call()", compiler=None)
    assert line.startswith(
        "ImportError kernel scatter_strided-uint32-int64 is not in the package with this source and these "
        "types, and compiling it needs numba-dpex: "
    )


def refused(folder, name="scatter_strided"):
    return (
        f"RuntimeError {folder}/kvcache_dpex/kernels/{name}.py was edited after it was imported: restart "
        "Python, or import it again with importlib.reload"
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [("scatter_strided", "edit()"), ("parts", "edit('parts', 'return', 'return 0 +')")],
    ids=["kernel", "helper"],
)
def test_an_edit_after_the_import_is_refused(own_copy, name, change):
    """numba #305. What was loaded before goes on; what is loaded from now on is refused."""
    lines = run(own_copy, f"call(); {change}; call(); call(blocks=3); call(slot='int32'); call(slot='int32')")
    assert lines == [BEFORE] * 3 + [refused(own_copy, name)] * 2


def test_an_edit_before_the_first_call_is_refused(own_copy):
    """The text is that of the import, not that of the first call."""
    assert run(own_copy, "edit(); call()") == [refused(own_copy)]


def test_an_edit_that_is_undone(own_copy):
    back = "edit(new='if 0 <= slot < num_slots:', old='if 0 < slot < num_slots:')"
    assert run(own_copy, f"edit(); call(); {back}; call()") == [refused(own_copy), BEFORE]


@needs_compiler
def test_reload_makes_an_edit_take_effect(own_copy):
    """Also for a call like those before, whose launch was kept."""
    code = """
        call()
        edit()
        importlib.reload(sys.modules["kvcache_dpex.kernels.scatter_strided"])
        call()
        call(blocks=3)
    """
    assert run(own_copy, code) == [BEFORE, AFTER, AFTER]


@needs_compiler
def test_a_second_edit_in_one_process(own_copy):
    """numba #158: numba itself would use what it has compiled of the first one."""
    code = """
        edit("parts", "return", "return 0 +")
        importlib.reload(sys.modules["kvcache_dpex.kernels.parts"])
        call()
        importlib.reload(sys.modules["kvcache_dpex.kernels.scatter_strided"])
        call()
        edit("parts", "return 0 +", "return 1 +")
        for name in ("parts", "scatter_strided"):
            importlib.reload(sys.modules[f"kvcache_dpex.kernels.{name}"])
        call()
    """
    stale = (
        "RuntimeError scatter_strided uses index_in_row of kvcache_dpex.kernels.parts as it was before that "
        "was imported again: import kvcache_dpex.kernels.scatter_strided again too, or restart Python"
    )
    lines = run(own_copy, code)
    assert lines[:2] == [stale, BEFORE]
    assert lines[2] != BEFORE


SHELL = """
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance(colors="nocolor")
    shell.user_ns.update(globals())
    shell.run_cell({before!r})
    from kvcache_dpex.runtime.compile import edits
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, edits._Finder)]
    edits.watch()  # as an import of the package in a notebook does
    for cell in {cells!r}:
        shell.run_cell(cell)
"""
AUTORELOAD = "%load_ext autoreload\n%autoreload 2"
needs_ipython = pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is missing")


@needs_ipython
@needs_compiler
@pytest.mark.parametrize("autoreload", [None, "before", "after"])
def test_an_edit_in_jupyter_takes_effect_in_the_next_cell(own_copy, autoreload):
    """Also for a call like those before; %autoreload, before or after us, may patch functions in place."""
    first, second = (AUTORELOAD if autoreload == when else "" for when in ("before", "after"))
    change = "edit('parts', 'return', 'return 1 +')"
    cells = [second, "call()", "edit()", "call()", "call(blocks=3)", change, "call()"]
    lines = run(own_copy, SHELL.format(before=first, cells=cells))
    assert lines[:3] == [BEFORE, AFTER, AFTER]
    assert len(lines) == 4
    assert lines[3] not in (BEFORE, AFTER)


@needs_ipython
@needs_compiler
def test_an_edit_in_jupyter_that_is_no_python(own_copy):
    """The old kernel must not run as if nothing were wrong."""
    broken = "edit(new='if 0 < slot < :')"
    mended = "edit(old='if 0 < slot < :', new='if 0 < slot < num_slots:')"
    lines = run(own_copy, SHELL.format(before="", cells=["call()", broken, "call()", mended, "call()"]))
    assert (lines[0], lines[-1]) == (BEFORE, AFTER)
    assert refused(own_copy) in lines
    assert any("SyntaxError: invalid syntax" in line for line in lines), lines
    assert lines.count(BEFORE) == 1


HOOK = """
    import ast, importlib.machinery, sys

    class Rewriting(importlib.machinery.SourceFileLoader):
        def source_to_code(self, data, path, *, _optimize=-1):
            tree = ast.parse(data)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    node.body.insert(0, ast.parse("rewritten = True").body[0])
            return compile(ast.fix_missing_locations(tree), path, "exec")

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("kvcache_dpex.kernels."):
                spec = importlib.machinery.PathFinder.find_spec(name, path)
                spec.loader = Rewriting(spec.loader.name, spec.loader.path)
                return spec

    sys.meta_path.insert(0, Finder())
    from kvcache_dpex.kernels.scatter_gpu import scatter_gpu
    from kvcache_dpex.runtime.compile import store
    print("rewritten" in scatter_gpu.__code__.co_varnames, store.load(scatter_gpu, slot="int64").origin)
"""


def test_a_hook_that_rewrites_functions_is_no_edit(tmp_path):
    """As those of coverage tools, typeguard and pytest."""
    unwritten = {"PYTHONPYCACHEPREFIX": str(tmp_path)}  # no .pyc of the files as they are
    done = run_python(textwrap.dedent(HOOK), KVCACHE_DPEX_KERNELS=None, **unwritten)
    assert done.stdout == "True packaged\n", done.stderr


def test_what_is_made_from_kernels_is_forgotten(monkeypatch):
    monkeypatch.setattr(edits, "_callbacks", [])
    made = edits.cache()
    made["kernel"] = 1
    edits.forget()
    assert made == {}
    edits._callbacks.pop()


USER = """
def kernel(item: "item[1]", data: "uint32*"):
    data[item.get_id(0)] = 5
"""
USE = """
    sys.path.insert(0, {folder!r})
    import of_a_user
    from kvcache_dpex.runtime.compile import store
    file = Path(of_a_user.__file__)
    def load():
        try:
            print(store.load(of_a_user.kernel).identity)
        except RuntimeError as error:
            print(error)
    load()
    file.write_text(file.read_text().replace("5", "66"))
    load()
    {again}
    load()
"""


@needs_compiler
@pytest.mark.parametrize(
    "again",
    ["importlib.reload(of_a_user)", "del sys.modules['of_a_user']; import of_a_user"],
    ids=["reload", "imported anew"],
)
def test_an_edit_of_a_users_kernel(own_copy, again):
    (own_copy / "of_a_user.py").write_text(USER)
    first, second, third = run(own_copy, USE.format(folder=str(own_copy), again=again))
    assert second in (
        first,
        f"{own_copy}/of_a_user.py was edited after it was imported: restart Python, or "
        "import it again with importlib.reload",
    )
    assert third not in (first, second)
    Path(own_copy, "of_a_user.py").write_text(USER.replace("5", "66"))
    assert run(own_copy, USE.format(folder=str(own_copy), again=""))[0] == third


def test_a_codec_that_was_imported_again_is_a_part_of_its_kernels(monkeypatch):
    """numba may hold what it compiled of it, though the file of the kernel was imported once."""
    from kvcache_dpex.kernels.dequantize_strided import dequantize_strided
    from kvcache_dpex.kernels.scatter_strided import scatter_strided

    monkeypatch.setattr(edits, "reimported", {"kvcache_dpex.kernels.codecs.int8"})
    assert source.is_reimported(dequantize_strided)
    assert not source.is_reimported(scatter_strided)
