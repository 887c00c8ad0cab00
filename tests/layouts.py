"""Environments of the tests' own: links to packages and libraries, and records of where they are."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from helpers import ROOT
from kvcache_dpex.runtime.environment import libraries

SITE = Path(sysconfig.get_path("purelib"))
OWNERS = sorted(set(libraries.OWNERS.values()))
VARIABLES = ("LD_LIBRARY_PATH", "OCL_ICD_FILENAMES", "ONEAPI_DEVICE_SELECTOR")


def link_packages(site):
    """dpctl, dpnp and what they import, in real folders: the linker follows `..` from where a link points."""
    for name in ("dpctl", "dpnp", "numpy", "platformdirs"):
        for path in (SITE / name, SITE / f"{name}.libs", *SITE.glob(f"{name}-*.dist-info")):
            if path.exists():
                ignored = shutil.ignore_patterns("__pycache__", "tests")
                shutil.copytree(path, site / path.name, copy_function=os.symlink, ignore=ignored)


def link_libraries(folder):
    """Every library of this environment again in another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in libraries.find("libintelocl").parent.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)


def record(site, owner, folder):
    """An installed distribution as pip and uv record it, with its libraries in a folder."""
    if not any(importlib.metadata.distributions(name=owner)):
        return
    files = importlib.metadata.files(owner) or []
    names = [file.name for file in files if re.search(r"\.so[.\d]*$", file.name)]
    paths = [Path(os.path.relpath(folder, site), name).as_posix() for name in names]
    info = distribution(site, owner, importlib.metadata.version(owner))
    (info / "RECORD").write_text("".join(f"{path},sha256=,1\n" for path in paths))


def distribution(site, name, version):
    """The metadata of a distribution, and nothing else of it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return info


def whole(folder):
    """A working environment: packages and records in one folder, the libraries below it."""
    link_packages(folder)
    link_libraries(folder / "lib")
    for owner in OWNERS:
        record(folder, owner, folder / "lib")
    return folder


def run(sites, *arguments, package=ROOT, **environment):
    """Run a Python that sees these folders and no other environment."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        [sys._base_executable, "-S", *map(str, arguments)],
        cwd=sites[0],  # where `-c` and `-m` look first
        env={**inherited, **environment, "PYTHONPATH": os.pathsep.join(map(str, [*sites, package]))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
