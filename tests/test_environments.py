"""Where pip, uv and Debian put libraries: dpctl and dpnp find them in each place, in any order of imports."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from helpers import ROOT, output_of, run_python
from kvcache_dpex.runtime.environment import libraries

USE = """
import kvcache_dpex as kv, dpctl, dpnp
key_cache, value_cache = kv.empty_cache(2, 4, 1, 8)
a = -4 * dpnp.eye(3, dtype="float32")
print(int((key_cache + 1).sum()), float(dpnp.linalg.solve(a, a).sum()), float(dpnp.matmul(a, a).sum()))
"""
RESULT = "64 3.0 48.0"
SITE = Path(sysconfig.get_path("purelib"))
OWNERS = sorted(set(libraries.OWNERS.values()))
NOTHING_SET = dict.fromkeys(("LD_LIBRARY_PATH", "OCL_ICD_FILENAMES", "ONEAPI_DEVICE_SELECTOR"))


def link_packages(site):
    """dpctl, dpnp and what they import; the linker takes the links' own folder as theirs."""
    site.mkdir(parents=True, exist_ok=True)
    for name in ("dpctl", "dpnp", "numpy", "numpy.libs", "platformdirs"):
        if (SITE / name).exists():
            (site / name).symlink_to(SITE / name)


def link_libraries(folder):
    """Every library of this environment again in another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in libraries.find("libintelocl").parent.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)


def installed(owner):
    """Files of a distribution of this environment."""
    files = importlib.metadata.files(owner) or []
    return [file for file in files if re.search(r"\.so[.\d]*$", file.name)]


def record(site, owner, folder):
    """An installed distribution as pip and uv record it, with its libraries in a folder."""
    if not any(importlib.metadata.distributions(name=owner)):
        return
    info = site / f"{owner.replace('-', '_')}-{importlib.metadata.version(owner)}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {owner}\nVersion: {importlib.metadata.version(owner)}\n")
    names = [Path(os.path.relpath(folder, site), file.name).as_posix() for file in installed(owner)]
    (info / "RECORD").write_text("".join(f"{name},sha256=,1\n" for name in names))


def run(sites, code=USE, **environment):
    """What the code prints in a Python that sees these folders and no other environment."""
    path = os.pathsep.join(map(str, [*sites, ROOT]))
    inherited = {name: value for name, value in os.environ.items() if name not in NOTHING_SET}
    done = subprocess.run(
        [sys._base_executable, "-S", "-c", code],
        cwd=sites[0],  # where `-c` looks first
        env={**inherited, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
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
    assert run([site]) == RESULT


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
    assert run([overlay, base]) == RESULT


def test_a_folder_for_each_distribution(tmp_path):
    link_packages(tmp_path / "site")
    for owner in OWNERS:
        link_libraries(tmp_path / owner / "lib")
        record(tmp_path / owner, owner, tmp_path / owner / "lib")
    assert run([tmp_path / "site", *(tmp_path / owner for owner in OWNERS)]) == RESULT


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
    assert run([site], LD_LIBRARY_PATH=str(theirs)) == RESULT


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
    assert run([site], FINDER.format(folder=str(hidden)) + USE) == RESULT


def test_a_record_of_files_that_are_gone(tmp_path, monkeypatch):
    """The next distribution of that name on sys.path has them; nothing is found where none has."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    for name in ("first", "second"):
        info = tmp_path / name / "intel_sycl_rt-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Name: intel-sycl-rt\nVersion: 1\n")
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
    code = "import sys; before = set(sys.modules); import kvcache_dpex; print(*sorted(set(sys.modules) - before))"
    loaded = set(run_python(code).stdout.split())
    assert "kvcache_dpex.runtime.environment.watch" in loaded
    assert not loaded & {"ctypes", "importlib.metadata", "pathlib", "re", "typing"}
