"""The package as pip installs it: what the wheel holds, dpnp imported first, and nothing left afterwards."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import ROOT
from kvcache_dpex import __version__

DPNP_FIRST = """
import dpnp
import kvcache_dpex as kv
print(kv.__file__, float(kv.empty_cache(2, 4, 1, 8)[0].sum()))
"""
# Building with the hatchling of this environment spares a download.
BUILD = ["--no-build-isolation"] if find_spec("hatchling") else []


def output(*command, **environment):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for name in ("LD_LIBRARY_PATH", "OCL_ICD_FILENAMES", "ONEAPI_DEVICE_SELECTOR"):
        variables.pop(name, None)
    done = subprocess.run(
        list(map(str, command)),
        env={**variables, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def pip(*arguments):
    return output(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", *BUILD, "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


class Environment:
    """A virtual environment that sees this one's packages, but none of its startup files."""

    def __init__(self, folder):
        output(sys.executable, "-m", "venv", "--without-pip", folder)
        self.folder = folder
        self.python = folder / "bin/python"
        self.site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        (self.site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, *arguments):
        pip("--python", self.python, "install", "--no-deps", "--no-compile", "--ignore-installed", *arguments)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install(wheel)
    return environment


def test_what_the_wheel_holds(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert top == {
        "kvcache_dpex",
        "kvcache_dpex.pth",
        "_kvcache_dpex_startup.py",
        f"kvcache_dpex-{__version__}.dist-info",
    }
    assert "kvcache_dpex/py.typed" in names
    assert "kvcache_dpex/spirv/manifest.json" in names
    assert not [name for name in names if "__pycache__" in name]


def test_dpnp_before_the_package(installed):
    """Import sorters put it first; no variable is set."""
    expected = f"{installed.site}/kvcache_dpex/__init__.py 0.0"
    assert output(installed.python, "-c", DPNP_FIRST) == expected


def test_dpnp_before_the_package_in_an_editable_install(tmp_path):
    environment = Environment(tmp_path)
    environment.install(*BUILD, "--editable", ROOT)
    assert output(environment.python, "-c", DPNP_FIRST) == f"{ROOT}/kvcache_dpex/__init__.py 0.0"


def test_a_python_that_needs_nothing_of_it_loads_one_small_file(installed):
    code = "import sys; print(*sorted(sys.modules))"
    started = set(output(installed.python, "-c", code).split())
    bare = set(output(installed.python, "-S", "-c", code).split())
    assert {name for name in started - bare if "kvcache" in name} == {"_kvcache_dpex_startup"}
    assert not started & {"ctypes", "pathlib", "re", "typing", "importlib.metadata"}


def test_the_console_script(installed):
    script = installed.folder / "bin/kvcache-dpex"
    assert output(script, "--version") == f"kvcache_dpex {__version__}"
    assert output(script, "--help").startswith("usage: kvcache-dpex ")


def test_uninstalling_leaves_nothing(wheel, tmp_path):
    environment = Environment(tmp_path)
    before = sorted(environment.folder.rglob("*"))
    environment.install(wheel)
    output(environment.python, "-c", "pass")  # writes the startup file's bytecode
    pip("--python", environment.python, "uninstall", "--yes", "kvcache_dpex")
    left = [path for path in sorted(environment.folder.rglob("*")) if path not in before]
    assert [path for path in left if path.name != "__pycache__"] == []
    assert output(environment.python, "-c", "import sys; print(sys.meta_path[0])").startswith(
        "<class '_frozen"
    )
