"""What needs processes of its own: fork and spawn, a terminal."""

import os
import pty
import textwrap

import pytest

from helpers import output_of, run_python
from kvcache_dpex.runtime.compile import compiler

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
@pytest.mark.parametrize("call", ["write()", "kv.reshape_and_cache(None, None, None, None, None)"])
def test_a_child_of_fork_is_refused_at_once(before, call):
    """A44: it would hang for good; the parent goes on."""
    printed = output_of(FORK.format(before=before, call=call), timeout=120)
    assert printed.splitlines() == [REFUSED, "parent 16.0"]


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
    """A44: the remedy that the error names."""
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
