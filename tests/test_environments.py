"""Where pip, uv and Debian put libraries: dpctl and dpnp find them in each place, in any order of imports."""

import sys

import pytest

from helpers import output_of, run_python
from kvcache_dpex.runtime.environment import libraries
from layouts import OWNERS, VARIABLES, distribution, link_libraries, link_packages, record, run

USE = """
import kvcache_dpex as kv, dpctl, dpnp
key_cache, value_cache = kv.empty_cache(2, 4, 1, 8)
a = -4 * dpnp.eye(3, dtype="float32")
print(int((key_cache + 1).sum()), float(dpnp.linalg.solve(a, a).sum()), float(dpnp.matmul(a, a).sum()))
"""
RESULT = "64 3.0 48.0"
NOTHING_SET = dict.fromkeys(VARIABLES)


def use(sites, code=USE, **environment):
    done = run(sites, "-c", code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PLACES = {
    "prefix": ("lib/python3/site-packages", "lib"),  # pip install --prefix, --user, Debian's /usr/local
    "target": ("", "lib"),  # uv pip install --target
    "elsewhere": ("site", "far/away"),
}


@pytest.mark.parametrize("place", PLACES)
def test_libraries_are_found_by_the_records(tmp_path, place):
    """dpnp #1698, numba-dpex #1505, setuptools #3557: not beside sys.prefix."""
    site, folder = (tmp_path / part for part in PLACES[place])
    link_packages(site)
    link_libraries(folder)
    for owner in OWNERS:
        record(site, owner, folder)
    assert use([site]) == RESULT


def test_an_overlay_over_another_environment(tmp_path):
    """nvmath-python #62: packages in one folder of sys.path, and the libraries that they need in another."""
    overlay, base = (
        tmp_path / "overlay/lib/python3/site-packages",
        tmp_path / "base/lib/python3/site-packages",
    )
    link_packages(overlay)
    link_libraries(tmp_path / "base/lib")
    for owner in OWNERS:
        record(base, owner, tmp_path / "base/lib")
    assert use([overlay, base]) == RESULT


def test_a_folder_for_each_distribution(tmp_path):
    link_packages(tmp_path / "site")
    for owner in OWNERS:
        link_libraries(tmp_path / owner / "lib")
        record(tmp_path / owner, owner, tmp_path / owner / "lib")
    assert use([tmp_path / "site", *(tmp_path / owner for owner in OWNERS)]) == RESULT


def test_a_library_path_with_sycl_but_without_mkl(tmp_path):
    """dpnp #2200: what LD_LIBRARY_PATH lacks comes from the records, and only that."""
    site, theirs, lib = (tmp_path / name for name in ("site", "theirs", "lib"))
    link_packages(site)
    link_libraries(lib)
    link_libraries(theirs)
    for file in theirs.glob("libmkl*"):
        file.unlink()
    for owner in OWNERS:
        record(site, owner, lib)
    for stem in ("libsycl", "libtbb"):
        for file in lib.glob(f"{stem}.so*"):
            file.unlink()
    assert use([site], LD_LIBRARY_PATH=str(theirs)) == RESULT


FINDER = """
import importlib.machinery, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("dpctl", "dpnp"):
            return importlib.machinery.PathFinder.find_spec(name, [{folder!r}])
sys.meta_path.append(Finder())
"""


def test_a_dpctl_that_a_finder_of_its_own_finds(tmp_path):
    """As in an editable install: no folder of sys.path holds it (it ended in ``OSError: None``)."""
    hidden, site = tmp_path / "hidden", tmp_path / "site"
    link_packages(site)
    hidden.mkdir()
    for name in ("dpctl", "dpnp"):
        (site / name).rename(hidden / name)
    link_libraries(tmp_path / "lib")
    for owner in OWNERS:
        record(site, owner, tmp_path / "lib")
    assert use([site], FINDER.format(folder=str(hidden)) + USE) == RESULT


def test_a_record_of_files_that_are_gone(tmp_path, monkeypatch):
    """The next distribution of that name on sys.path has them; nothing is found where none has."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    for name in ("first", "second"):
        info = distribution(tmp_path / name, "intel-sycl-rt", "1")
        (info / "RECORD").write_text("lib/libsycl.so,,\nlib/libsycl.so.7,,\nlib/libsycl.so.7.2.0,,\n")
    assert libraries.find("libsycl") is None
    lib = tmp_path / "second/lib"
    lib.mkdir()
    for name in ("libsycl.so", "libsycl.so.7", "libsycl.so.7.2.0"):
        (lib / name).touch()
    assert libraries.find("libsycl") == lib / "libsycl.so.7"
    assert libraries.find("libtbb") is None


def test_without_any_variable():
    """dpctl #914: neither LD_LIBRARY_PATH nor OCL_ICD_FILENAMES nor a selector is needed."""
    assert output_of(USE, **NOTHING_SET) == RESULT


def other_environment_driver(tmp_path):
    """The variables that a parent of another environment, whose driver does not load here, leaves behind."""
    file = tmp_path / "libintelocl.so"
    file.write_bytes(b"")
    return {"OCL_ICD_FILENAMES": str(file), libraries._OWN_DRIVER: str(file)}


def test_a_child_of_a_parent_of_another_environment(tmp_path):
    """opencv-python #1268: the driver that the parent's environment set is not ours."""
    assert output_of(USE, **{**NOTHING_SET, **other_environment_driver(tmp_path)}) == RESULT


def test_a_child_keeps_the_variable_of_the_user(tmp_path):
    variables = {**NOTHING_SET, **other_environment_driver(tmp_path), libraries._OWN_DRIVER: "/another"}
    code = "import kvcache_dpex, dpctl, os; print(dpctl.get_devices(), os.environ['OCL_ICD_FILENAMES'])"
    assert output_of(code, **variables) == f"[] {tmp_path}/libintelocl.so"


AGAIN = """
import sys
import kvcache_dpex as kv
first = kv.empty_cache(2, 4, 1, 8)
{step}
import kvcache_dpex as kv
kv.empty_cache(2, 4, 1, 8)
from kvcache_dpex.runtime.environment import watch
print(sum(watch.is_watcher(finder) for finder in sys.meta_path))
"""
DROP = """
for name in [name for name in sys.modules if name.split(".")[0] == "kvcache_dpex"]:
    del sys.modules[name]
"""


@pytest.mark.parametrize("step", ["import importlib; importlib.reload(kv)", DROP], ids=["reload", "dropped"])
def test_a_second_import_goes_on_with_the_first_watcher(step):
    """iree #19303"""
    assert output_of(AGAIN.format(step=step)) == "1"


def test_what_an_import_of_the_package_loads():
    """It is imported wherever dpnp is, so it imports next to nothing."""
    code = "import sys; before = set(sys.modules); import kvcache_dpex; print(*set(sys.modules) - before)"
    loaded = set(run_python(code).stdout.split())
    assert "kvcache_dpex.runtime.environment.watch" in loaded
    assert not loaded & {"ctypes", "importlib.metadata", "pathlib", "re", "typing"}
