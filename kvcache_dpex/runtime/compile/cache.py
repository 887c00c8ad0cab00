"""The folder of the modules that were compiled on this machine.

A file holds a module and a seal over its name, its identity and its bytes, so that a damaged file or
that of another kernel is never taken. Folder and files must belong to the user or to root and must
not be writable by others, since whoever writes them chooses what the device executes. What does not
hold counts as absent: the kernel is compiled, and `problems` tells why.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import spirv


def cache_folder() -> Path:
    """``KVCACHE_DPEX_CACHE``, else ``kvcache_dpex`` in the user's cache folder; below /tmp without a home."""
    chosen = os.environ.get("KVCACHE_DPEX_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvcache_dpex"
    except RuntimeError:  # this user has no home, as in many containers
        return Path(os.environ.get("TMPDIR") or "/tmp", f"kvcache_dpex-{os.geteuid()}")


def read(name: str, identity: str) -> bytes | None:
    """The module of this name and identity, or None."""
    path = _path(name, identity)
    if folder_problem() is not None:
        return None
    try:
        with path.open("rb") as file:
            if _distrust(path, os.fstat(file.fileno())) is not None:
                return None
            sealed = file.read()
    except OSError:
        return None
    binary = sealed[:-32]
    is_own = sealed == _sealed(binary, name, identity) and spirv.is_module(binary, name.replace("-", "_"))
    return binary if is_own else None


def write(name: str, identity: str, binary: bytes) -> None:
    """Store a module so that a reader sees all of it or nothing; where that is impossible, do nothing."""
    with contextlib.suppress(OSError):
        _make_folder()
        if folder_problem() is None:
            _write_atomically(_path(name, identity), _sealed(binary, name, identity))


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Let one process at a time compile into the folder; a folder that cannot be used is not locked."""
    descriptor = None
    with contextlib.suppress(OSError):
        _make_folder()
        if folder_problem() is None:
            descriptor = os.open(cache_folder(), os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def problems() -> list[str]:
    """Why the cache folder or files in it are not used, with the remedy; empty where all is well."""
    problem = folder_problem()
    if problem is not None:
        return [problem]
    folder = cache_folder()
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{folder} cannot be written; name another folder by KVCACHE_DPEX_CACHE"]
    reasons = [_distrust(path, path.stat()) for path in sorted(folder.glob("*.spv"))]
    return [reason for reason in reasons if reason is not None]


def folder_problem() -> str | None:
    """Why nothing in the folder is read or executed, or None."""
    folder = cache_folder()
    try:
        return _distrust(folder, folder.stat())
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror}); name another folder by KVCACHE_DPEX_CACHE"


def _distrust(path: Path, status: os.stat_result) -> str | None:
    """Why somebody else may have written a file or folder, or None."""
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} is ignored, since it belongs to user {status.st_uid}; set KVCACHE_DPEX_CACHE"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        return f"{path} is ignored, since others may write to it (mode {mode:o}); chmod go-w {path}"
    return None


def _make_folder() -> None:
    cache_folder().mkdir(mode=0o755, parents=True, exist_ok=True)


def _path(name: str, identity: str) -> Path:
    return cache_folder() / f"{name}-{identity[:16]}.spv"


def _sealed(binary: bytes, name: str, identity: str) -> bytes:
    return binary + hashlib.sha256(f"{name}\0{identity}\0".encode() + binary).digest()


def _write_atomically(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, 0o644)  # a folder that is shared is read by others
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
