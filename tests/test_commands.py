"""The command line: what is printed, and the exit status, also where something is wrong."""

import pytest

from helpers import output_of, run_python
from kvcache_dpex import __version__
from kvcache_dpex.__main__ import main
from kvcache_dpex.ops import write
from kvcache_dpex.runtime.compile import compiler, edits, store
from kvcache_dpex.runtime.environment import devices, libraries
from kvcache_dpex.runtime.launch import arrays

right = write.reshape_and_cache


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command; its exit status and its lines, which a wide terminal does not break."""
    monkeypatch.setenv("COLUMNS", "300")

    def command(*arguments):
        status = main(list(arguments))
        return status, capsys.readouterr().out.strip().splitlines()

    return command


def test_check(run, queue):
    status, lines = run("check", "--no-timing")
    assert status == 0
    device = queue.sycl_device
    assert lines[0] == f"{device.name}, {device.filter_string}, driver {device.driver_version}"
    assert [line.split(".")[0] for line in lines[1:-1]] == list("12345678")
    assert all(line.endswith(": ok") for line in lines[1:-1])
    assert lines[-1] == "all checks hold"


def nothing(key, value, key_cache, value_cache, slots):
    """Forgets to write."""


def exchanged(key, value, key_cache, value_cache, slots):
    right(value, key, key_cache, value_cache, slots)


def wrapped(key, value, key_cache, value_cache, slots):
    """Padding lands in the last slot."""
    host = arrays.to_numpy(slots)
    host[host < 0] = key_cache.shape[0] * key_cache.shape[1] - 1
    tensor = arrays.tensor_module()
    right(key, value, key_cache, value_cache, tensor.asarray(host, sycl_queue=slots.sycl_queue))


def spilled(key, value, key_cache, value_cache, slots):
    """One element beyond what was asked for."""
    right(key, value, key_cache, value_cache, slots)
    untouched = set(range(256)) - set(arrays.to_numpy(slots).tolist())
    value_cache[divmod(min(untouched), 16)][0, 0] = 1


def rounded(key, value, key_cache, value_cache, slots):
    """Keys arrive with their last bits changed."""
    right(key * 1.0000001 + 1e-7, value, key_cache, value_cache, slots)


@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        (nothing, ["1", "2", "4"]),
        (exchanged, ["1", "2", "4"]),
        (wrapped, ["3", "4"]),
        (spilled, ["3", "4"]),
        (rounded, ["1", "4"]),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_check_notices(run, monkeypatch, broken, failing):
    monkeypatch.setattr(write, "reshape_and_cache", broken)
    status, lines = run("check", "--no-timing")
    assert status == 1
    assert [line.split(".")[0] for line in lines if "FAILED" in line] == failing
    assert all(line.endswith(" differ") for line in lines if "FAILED" in line)
    assert lines[-1] == "not every check holds"


def test_check_is_the_command_by_default():
    """As a user types it: a process of its own, with the timing line before the last."""
    lines = output_of("", arguments=["-m", "kvcache_dpex"]).splitlines()
    assert lines[-1] == "all checks hold"
    assert "by dpnp indexing" in " ".join(lines[-4:-1])


def test_check_of_a_device_that_is_not_there():
    done = run_python("", arguments=["-m", "kvcache_dpex", "check", "--device", "gpu:99"])
    assert done.returncode == 1
    assert "`device` 'gpu:99' names no device here; there is " in done.stderr


def test_doctor(run, queue):
    status, lines = run("doctor")
    assert lines[0].startswith(f"kvcache_dpex {__version__} on Python ")
    assert lines[0].endswith("compile here" if compiler.available() else "packaged SPIR-V, no compiler")
    text = "\n".join(lines)
    assert f"SYCL runtime libsycl.so.{libraries.linked_sycl_version()}, OpenCL CPU driver " in text
    assert queue.sycl_device.filter_string in text
    total = len(store.catalogue())
    assert f"{total} of {total} kernels packaged with this source, cache {store.cache_folder()}" in text
    assert (lines[-1] == "nothing is missing") == (status == 0)
    assert any(line.startswith("missing: ") for line in lines) == (status == 1)


def test_doctor_names_what_is_missing_and_the_command(run, monkeypatch):
    def none_found():
        raise RuntimeError("two SYCL runtimes")

    monkeypatch.setattr(devices, "load_dpctl", none_found)
    monkeypatch.setattr(libraries, "find", lambda name: None)
    monkeypatch.setattr(compiler, "available", lambda: False)
    monkeypatch.setattr(store, "packaged", lambda wanted: None)
    status, lines = run("doctor")
    assert status == 1
    assert "missing: two SYCL runtimes" in lines
    assert "missing: an OpenCL driver for the CPU device: pip install intel-opencl-rt" in lines
    total = len(store.catalogue())
    assert any(
        line.startswith(f"0 of {total} kernels packaged") and "pip install 'kvcache_dpex[jit]'" in line
        for line in lines
    )


def test_kernels_list(run):
    status, lines = run("kernels", "list")
    assert status == 0
    rows = [line.strip("│ ").split() for line in lines if "packaged" in line]
    assert [row[0] for row in rows] == list(store.manifest()["modules"])


def test_kernels_that_come_from_nowhere(run, monkeypatch):
    monkeypatch.setattr(compiler, "available", lambda: False)
    monkeypatch.setattr(store, "packaged", lambda wanted: None)
    edits.forget()
    status, lines = run("kernels", "list")
    assert status == 0
    rows = [line for line in lines if "nowhere" in line]
    assert len(rows) == len(store.catalogue())
    assert all("pip install 'kvcache_dpex[jit]' (Python 3.9 to 3.11)" in row for row in rows)


@pytest.mark.skipif(not compiler.available(), reason="compiling needs numba-dpex")
def test_kernels_build_writes_what_the_package_holds(monkeypatch, tmp_path):
    """Three kernels into an empty folder: the same files and entries as the package's."""
    chosen = store.catalogue()[:3]
    entries = store.manifest()["modules"]
    packaged = store.PACKAGED
    monkeypatch.setattr(store, "catalogue", lambda: chosen)
    monkeypatch.setattr(store, "PACKAGED", tmp_path)
    (tmp_path / "stale.spv").write_bytes(b"")
    try:
        modules = store.build_package()
        names = [module.name for module in modules]
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            ["manifest.json", *(f"{name}.spv" for name in names)]
        )
        for name in names:
            assert (tmp_path / f"{name}.spv").read_bytes() == (packaged / f"{name}.spv").read_bytes()
        assert store.manifest()["modules"] == {name: entries[name] for name in names}
    finally:
        store.manifest.cache_clear()
        edits.forget()


def test_without_a_known_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["chek"])
    assert ended.value.code == 2
    assert "invalid choice: 'chek'" in capsys.readouterr().err
