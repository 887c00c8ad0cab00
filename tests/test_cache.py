"""The cache folder: whole, sealed files that belong to the user, and no trouble where there can be none."""

import os
import pwd
import threading

import pytest

from helpers import output_of, tiny_module
from kvcache_dpex.runtime.compile import cache, store

NAME, IDENTITY = "double-uint32", "0123456789abcdef" * 4
MODULE = tiny_module("double_uint32")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(folder):
    """The file of a stored module."""
    cache.write(NAME, IDENTITY, MODULE)
    assert cache.read(NAME, IDENTITY) == MODULE
    (path,) = folder.iterdir()
    return path


def give_away(path, monkeypatch):
    """Make a file or folder that of another user."""
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
        return 54321
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    return owner


@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[:-1], lambda whole: b"", lambda whole: b"x" + whole[1:], lambda whole: whole + b"x"],
    ids=["truncated", "empty", "changed", "longer"],
)
def test_a_damaged_file_is_not_read(file, damage):
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert cache.read(NAME, IDENTITY) is None
    cache.write(NAME, IDENTITY, MODULE)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("binary", "name", "identity"),
    [
        (MODULE, NAME, IDENTITY[:-1] + "0"),
        (MODULE, "double-uint64", IDENTITY),
        (tiny_module("other"), NAME, IDENTITY),
        (MODULE + tiny_module("another")[20:], NAME, IDENTITY),
        (b"", NAME, IDENTITY),
    ],
    ids=["another identity", "another name", "another entry point", "two entry points", "an empty module"],
)
def test_a_sealed_file_of_another_kernel_is_not_read(file, binary, name, identity):
    """LMCache #4597: a launch of it would end the process."""
    file.write_bytes(cache._sealed(binary, name, identity))
    assert cache.read(NAME, IDENTITY) is None
    file.write_bytes(cache._sealed(MODULE, NAME, IDENTITY))
    assert cache.read(NAME, IDENTITY) == MODULE


def test_a_file_of_another_user(file, monkeypatch):
    """intel-xpu-backend-for-triton #3217."""
    owner = give_away(file, monkeypatch)
    monkeypatch.setattr(cache, "folder_problem", lambda: None)  # without root, the folder changes hands too
    assert cache.read(NAME, IDENTITY) is None
    assert cache.problems() == [
        f"{file} is ignored, since it belongs to user {owner}; set KVCACHE_DPEX_CACHE"
    ]


def test_a_folder_of_another_user(file, folder, monkeypatch):
    owner = give_away(folder, monkeypatch)
    assert cache.read(NAME, IDENTITY) is None
    before = file.stat().st_mtime_ns, list(folder.iterdir())
    cache.write(NAME, IDENTITY, MODULE)
    assert (file.stat().st_mtime_ns, list(folder.iterdir())) == before
    assert cache.problems() == [
        f"{folder} is ignored, since it belongs to user {owner}; set KVCACHE_DPEX_CACHE"
    ]


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_folder_that_others_write(file, folder, mode):
    folder.chmod(mode)
    assert cache.read(NAME, IDENTITY) is None
    file.unlink()
    cache.write(NAME, IDENTITY, MODULE)
    assert list(folder.iterdir()) == []
    assert cache.problems() == [
        f"{folder} is ignored, since others may write to it (mode {mode:o}); chmod go-w {folder}"
    ]


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_write(file, mode):
    """It is ignored until it is written anew."""
    file.chmod(mode)
    assert cache.read(NAME, IDENTITY) is None
    assert cache.problems() == [
        f"{file} is ignored, since others may write to it (mode {mode:o}); chmod go-w {file}"
    ]
    cache.write(NAME, IDENTITY, MODULE)
    assert cache.read(NAME, IDENTITY) == MODULE
    assert cache.problems() == []


@pytest.mark.parametrize("mask", [0, 0o002, 0o077])
def test_modes(folder, mask):
    """numba #5566: readable by all who may enter the folder, writable by nobody else, whatever the umask."""
    old = os.umask(mask)
    try:
        cache.write(NAME, IDENTITY, MODULE)
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o755 & ~mask
    assert next(folder.iterdir()).stat().st_mode & 0o777 == 0o644
    assert cache.read(NAME, IDENTITY) == MODULE


def test_a_folder_whose_parents_are_missing(monkeypatch, tmp_path):
    """As for a new user, who has no ~/.cache yet."""
    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(tmp_path / "home" / "cache" / "modules"))
    cache.write(NAME, IDENTITY, MODULE)
    assert cache.read(NAME, IDENTITY) == MODULE


def test_a_full_disk_leaves_no_file(folder):
    """In a process of its own: a limit on files stops LLVM's output too, and that ends the process."""
    output_of(
        "import resource\n"
        "from kvcache_dpex.runtime.compile import cache\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(MODULE) // 2}, resource.RLIM_INFINITY))\n"
        f"cache.write({NAME!r}, {IDENTITY!r}, {MODULE!r})"
    )
    assert list(folder.iterdir()) == []


def test_an_interrupted_store_leaves_no_file(folder, monkeypatch):
    def interrupted(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.write(NAME, IDENTITY, MODULE)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made(monkeypatch, tmp_path):
    """Its parent is a file: packaged modules run, nothing is stored, and doctor learns why."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("KVCACHE_DPEX_CACHE", str(folder))
    cache.write(NAME, IDENTITY, MODULE)
    assert cache.read(NAME, IDENTITY) is None
    with cache.lock():
        pass
    from kvcache_dpex.kernels.scatter_gpu import scatter_gpu

    assert store.load(scatter_gpu, slot="int64").origin == "packaged"
    assert cache.problems() == [
        f"{folder} cannot be used (Not a directory); name another folder by KVCACHE_DPEX_CACHE"
    ]


def test_a_folder_that_cannot_be_written(folder, monkeypatch):
    assert cache.problems() == []
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder.parent)
    assert cache.problems() == [f"{folder} cannot be written; name another folder by KVCACHE_DPEX_CACHE"]


def test_the_folder_by_default(monkeypatch):
    monkeypatch.delenv("KVCACHE_DPEX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(cache.cache_folder()) == "/somewhere/kvcache_dpex"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(cache.cache_folder()) == "/home/someone/.cache/kvcache_dpex"


def test_a_user_without_a_home(monkeypatch, tmp_path):
    """triton #518: no HOME and no entry in the password database."""

    def nobody(number):
        raise KeyError(number)

    for variable in ("KVCACHE_DPEX_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cache.cache_folder() == tmp_path / f"kvcache_dpex-{os.geteuid()}"
    cache.write(NAME, IDENTITY, MODULE)
    assert cache.read(NAME, IDENTITY) == MODULE


def test_the_lock_ends_with_its_block(folder):
    """A second thread gets it as soon as the first has left, also by an error."""
    with pytest.raises(ValueError, match="inside"), cache.lock():
        raise ValueError("inside")
    entered = threading.Event()

    def enter():
        with cache.lock():
            entered.set()

    with cache.lock():
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join()
    assert list(folder.iterdir()) == []


WRITER = """
from kvcache_dpex.runtime.compile import cache
for turn in range(150):
    cache.write({name!r}, {identity!r}, bytes.fromhex({module!r}) + bytes([1, 0, 1, 0]) * (25_000 + turn % 2))
"""


def test_two_processes_at_once(folder):
    """Two writers of one file and a reader: what is read is always whole, and no other file is left."""
    code = WRITER.format(name=NAME, identity=IDENTITY, module=MODULE.hex())
    seen, done = set(), []
    writers = [threading.Thread(target=lambda: done.append(output_of(code))) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        binary = cache.read(NAME, IDENTITY)
        assert binary is not None or not seen
        seen |= set() if binary is None else {len(binary)}
    assert done == ["", ""]
    assert seen >= {len(MODULE) + 100_000, len(MODULE) + 100_004}
    assert len(list(folder.iterdir())) == 1


def test_doctor_shows_why_the_folder_is_not_used(file, folder, capsys):
    from kvcache_dpex.__main__ import main

    folder.chmod(0o777)
    main(["doctor"])
    assert f"note: {cache.problems()[0]}" in capsys.readouterr().out.splitlines()
