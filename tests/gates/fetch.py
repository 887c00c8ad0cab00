"""Unpacks Intel's offline compiler and Level Zero driver from a newer Debian suite; installs nothing.

``python -m tests.gates.fetch`` looks where this machine's own apt sources point. The packages land in
the folder of `native.folder`, with the C library that they need. Exit status 3: not to be had here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import native

SUITES = ("forky", "sid")
PACKAGES = (
    "intel-ocloc",
    "libigc2",
    "libze-intel-gpu1",
    "libze1",
    "libigdgmm12",
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "zlib1g",
)
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def main() -> int:
    target = native.folder()
    if native.missing() is None:
        print(f"{target} has it already")
        return 0
    if target.exists() and any(target.iterdir()):
        print(f"{target} holds something else; name another folder by KVCACHE_DPEX_IGC", file=sys.stderr)
        return 3
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        print("this machine has no apt-get and dpkg", file=sys.stderr)
        return 3
    for archive in _archives():
        for suite in SUITES:
            with tempfile.TemporaryDirectory() as work:
                if _fetch(archive, suite, Path(work)):
                    _unpack(Path(work), target)
                    print(f"{len(PACKAGES)} packages of {suite} unpacked in {target}")
                    return 0
    print(
        f"no archive of this machine's apt sources has {PACKAGES[0]} in {' or '.join(SUITES)}",
        file=sys.stderr,
    )
    return 3


def _archives() -> list[str]:
    """The archives that apt knows, in its own order."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    )
    return list(dict.fromkeys(listed.stdout.split()))


def _fetch(archive: str, suite: str, work: Path) -> bool:
    """Download the packages of one suite, with lists and a cache of their own."""
    signed = f"[signed-by={KEYS}] " if KEYS.exists() else ""
    (work / "sources.list").write_text(f"deb {signed}{archive} {suite} main\n")
    (work / "lists/partial").mkdir(parents=True)
    (work / "cache/archives/partial").mkdir(parents=True)
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    for command in (["update"], ["download", *PACKAGES]):
        result = subprocess.run([*apt, *command], cwd=work, capture_output=True, text=True)
        if result.returncode:
            print(f"{archive} {suite}: {result.stderr.strip()[-300:]}", file=sys.stderr)
            return False
    return True


def _unpack(work: Path, target: Path) -> None:
    """Unpack beside the target first, so that an interrupted run leaves no half of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent))
    for package in sorted(work.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(partial)], check=True)
    os.replace(partial, target)


if __name__ == "__main__":
    raise SystemExit(main())
