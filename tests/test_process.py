"""What needs processes of its own: fork and spawn, a terminal."""

import os
import pty
import textwrap

import pytest

import kvcache_dpex
from helpers import output_of, run_python
from kvcache_dpex.runtime.compile import compiler
from kvcache_dpex.runtime.environment import libraries

FORK = textwrap.dedent("""
    import os, sys, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any fork with threads
    import kvcache_dpex as kv

    def write():
        import dpnp
        caches = kv.empty_cache(2, 4, 1, 8)
        key = dpnp.ones((2, 1, 8), dtype="float32", sycl_queue=caches[0].sycl_queue)
        kv.reshape_and_cache(key, key, *caches, dpnp.asarray([1, 2], sycl_queue=key.sycl_queue))
        return float(caches[0].sum())

    {before}
    child = os.fork()
    if child == 0:
        try:
            print("child", {call})
        except RuntimeError as error:
            print("child", error)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("parent", write())
""")
REFUSED = (
    "child this process was forked after dpctl was loaded, and SYCL does not survive a fork; start "
    "workers with multiprocessing.get_context('spawn')"
)


@pytest.mark.parametrize(
    "before",
    ["write()", "kv.empty_cache(2, 4, 1, 8)", "import dpnp; dpnp.ones(3) + 1"],
    ids=["a write", "a cache", "dpnp alone"],
)
def test_a_child_of_fork_is_refused_at_once(before):
    """dpctl #1169: it would hang for good; the parent goes on."""
    printed = output_of(FORK.format(before=before, call="write()"), timeout=120)
    assert printed.splitlines() == [REFUSED, "parent 16.0"]


CALLS = [
    "kv.empty_cache(2, 4, 1, 8)",
    "kv.empty_quant_cache(2, 4, 1, 8)",
    "kv.reshape_and_cache(None, None, None, None, None)",
    "kv.reshape_and_cache_quant(None, None, None, None, None, None, None)",
    "kv.reshape_and_cache_fp8(None, None, None, None, None, None, None)",
    "kv.dequant_cache(None, None)",
    "kv.dequant_caches(None, None, None, None)",
    "kv.paged_attention(None, None, None, None, None)",
    "kv.merge_attention_states(None, None, None, None)",
    "kv.copy_blocks(None, None)",
    "kv.swap_blocks(None, None, None)",
    "kv.zero_blocks(None, None)",
    "kv.gather_blocks(None, None)",
    "kv.move_blocks(None, None, None, None)",
    "kv.slot_mapping(None, None, 4)",
    "kv.get_batch_indices_positions(None, None, None)",
    "kv.append_paged_kv_cache(None, None, None, None, None, None, None, None)",
    "kv.concat_and_cache_mla(None, None, None, None)",
    "kv.launch_kernel(None, None)",
    "kv.rotary_and_cache(None, None, None, None, None, None, None, None)",
]


def test_every_operation_of_a_child_is_refused():
    """dpctl #1971: before it looks at its arguments."""
    operations = {f"kv.{name}" for name in kvcache_dpex.__all__ if name.islower()}  # not the classes
    operations -= {"kv.simulate"}  # NumPy only
    assert {call.partition("(")[0] for call in CALLS} == operations
    calls = "\n".join(f"outcome(lambda: {call})" for call in CALLS)
    code = FORK.format(before="write()", call="all_outcomes()").replace(
        "child = os.fork()",
        "def outcome(call):\n"
        "    try:\n"
        "        call()\n"
        "    except RuntimeError as error:\n"
        "        print('child', error)\n"
        f"def all_outcomes():\n{textwrap.indent(calls, '    ')}\n"
        "child = os.fork()",
    )
    printed = output_of(code, timeout=120).splitlines()
    assert printed == [*[REFUSED] * len(CALLS), "child None", "parent 16.0"]


TORCH_FORK = """
import os, sys
from kvcache_dpex import torch as kv
import torch
caches = kv.empty_cache(2, 4, 1, 8, device="cpu")
key = torch.ones(2, 1, 8)
kv.reshape_and_cache(key, key, *caches, torch.tensor([1, 2]))
assert "dpnp" not in sys.modules
if os.fork() == 0:
    try:
        kv.reshape_and_cache(key, key, *caches, torch.tensor([1, 2]))
    except RuntimeError as error:
        print("child", error, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_child_of_a_parent_that_used_only_tensors():
    pytest.importorskip("torch", reason="torch is not installed")
    assert output_of(TORCH_FORK, timeout=120) == REFUSED


FORK_BEFORE_THE_IMPORT = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
{before}
if os.fork() == 0:
    {first}
    import kvcache_dpex as kv
    try:
        print("child", float(kv.empty_cache(2, 4, 1, 8)[0].sum()))
    except RuntimeError as error:
        print("child", error)
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""
USE_DPNP = "import dpnp; (dpnp.ones(3) + 1).sum()"
# As where the package is found on PYTHONPATH and is not installed.
NO_STARTUP_FILE = "sys.meta_path[:] = [f for f in sys.meta_path if 'kvcache_dpex' not in str(f)]"


def without_startup_file():
    """What makes dpnp work without this package."""
    driver = libraries.find("libintelocl")
    return {"LD_LIBRARY_PATH": str(driver.parent), "OCL_ICD_FILENAMES": str(driver)}


@pytest.mark.parametrize("startup_file", [True, False])
def test_a_fork_before_the_package_is_imported(startup_file):
    """dpctl #1169: the parent uses dpnp, and only the child imports the package."""
    before = USE_DPNP if startup_file else f"{NO_STARTUP_FILE}\n{USE_DPNP}"
    code = FORK_BEFORE_THE_IMPORT.format(before=before, first="pass")
    variables = {} if startup_file else without_startup_file()
    assert output_of(code, timeout=120, **variables) == REFUSED


def test_a_parent_of_a_fork_that_imports_the_package_later():
    """It shares pages with its child, as the child does with it, but SYCL works on in the parent."""
    code = f"""
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import sys
{NO_STARTUP_FILE}
{USE_DPNP}
reader, writer = os.pipe()
if os.fork() == 0:
    os.close(writer)
    os.read(reader, 1)
    os._exit(0)
import kvcache_dpex as kv
print(float(kv.empty_cache(2, 4, 1, 8)[0].sum()))
os.close(writer)
os.wait()
"""
    assert output_of(code, timeout=120, **without_startup_file()) == "0.0"


def test_a_child_of_fork_that_imports_dpnp_itself():
    """dpnp before the package and no startup file, but nothing of SYCL in the parent: it works."""
    code = FORK_BEFORE_THE_IMPORT.format(before=NO_STARTUP_FILE, first=USE_DPNP)
    assert output_of(code, timeout=120, **without_startup_file()) == "child 0.0"


def test_a_fork_before_sycl_is_harmless():
    assert output_of(FORK.format(before="", call="write()"), timeout=120) == "child 16.0\nparent 16.0"


SPAWN = textwrap.dedent("""
    import multiprocessing, sys
    import kvcache_dpex as kv

    def work(number):
        return float(kv.empty_cache(2, 4, 1, 8)[0].sum()) + number

    if __name__ == "__main__":
        kv.empty_cache(2, 4, 1, 8)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(work, [1, 2]))
""")


def test_spawn_works(tmp_path):
    """dpctl #1971: the remedy that the error names."""
    script = tmp_path / "script.py"  # whose functions a worker can import, as it cannot those of `-c`
    script.write_text(SPAWN)
    done = run_python("", arguments=[script])
    assert done.stdout == "[1.0, 2.0]\n", done.stderr


COMPILE = textwrap.dedent("""
    from kvcache_dpex.kernels.scatter_strided import scatter_strided
    from kvcache_dpex.runtime.compile import store
    print(store.load(scatter_strided, word="uint8", slot="int32"))
""")


@pytest.mark.skipif(not compiler.available(), reason="compiling needs numba-dpex")
def test_progress_on_a_terminal_and_silence_elsewhere(tmp_path):
    options = {"KVCACHE_DPEX_CACHE": str(tmp_path), "KVCACHE_DPEX_KERNELS": "compile", "TERM": "xterm"}
    done = run_python(COMPILE, **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "compiled, capabilities Addresses, Int64, Int8, Kernel, Linkage>" in done.stdout
    terminal, other_end = pty.openpty()
    done = run_python(COMPILE, stderr=other_end, **options)
    assert "compiling kernel scatter_strided-uint8-int32" in os.read(terminal, 10_000).decode()
    assert done.returncode == 0
    os.close(terminal)
    os.close(other_end)
