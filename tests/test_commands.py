"""The command line: what is printed, and the exit status, also where something is wrong."""

import json
import os
import re
import subprocess
import sys

import pytest

import kvcache_dpex
from helpers import ROOT, output_of, run_python
from kvcache_dpex import __version__
from kvcache_dpex.__main__ import main
from kvcache_dpex.commands import arguments, check, output
from kvcache_dpex.ops import dequantize, quantize, write
from kvcache_dpex.runtime.compile import compiler, edits, package, store
from kvcache_dpex.runtime.environment import devices, gpu
from kvcache_dpex.runtime.launch import arrays

right = write.reshape_and_cache
right_quant = quantize.reshape_and_cache_quant
right_dequant = dequantize.dequant_cache


@pytest.fixture
def run(capsys):
    """Runs a command; its exit status and its lines."""

    def command(*arguments):
        status = main(list(arguments))
        return status, capsys.readouterr().out.strip().splitlines()

    return command


@pytest.mark.parametrize("no_gpu", [True, False])
def test_check(run, queue, monkeypatch, no_gpu):
    """It names the device, and says so where no GPU is visible."""
    found = devices.load_dpctl().get_devices()
    if no_gpu and any(device.is_gpu for device in found):
        pytest.skip("there is a GPU")
    if not no_gpu:
        monkeypatch.setattr(check, "any", lambda each: True, raising=False)
    status, lines = run("check", "--no-timing")
    assert status == 0
    device = queue.sycl_device
    assert lines[0] == f"{device.name}, {device.filter_string}, driver {device.driver_version}"
    if no_gpu:
        assert lines.pop(1) == f"note: {gpu.absence()}"
    assert [line.split(".")[0] for line in lines[1:-1]] == list("12345678")
    assert all(line.endswith(": ok") for line in lines[1:-1])
    assert lines[-1] == f"all checks hold on {device.filter_string}"


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
def test_check_notices_a_wrong_write(run, monkeypatch, queue, broken, failing):
    monkeypatch.setattr(kvcache_dpex, "reshape_and_cache", broken)
    assert_noticed(run, queue, failing)


def assert_noticed(run, queue, failing):
    status, lines = run("check", "--no-timing")
    assert status == 1
    assert [line.split(".")[0] for line in lines if "FAILED" in line] == failing
    assert all(line.endswith(" differ") for line in lines if "FAILED" in line)
    assert lines[-1] == f"not every check holds on {queue.sycl_device.filter_string}"


def change(name, index, value):
    """A quantized write that then changes one element of `kq`, `vq`, `ks` or `vs`."""

    def broken(key, value_rows, kq, vq, ks, vs, slots):
        right_quant(key, value_rows, kq, vq, ks, vs, slots)
        written = sorted(slot for slot in arrays.to_numpy(slots).tolist() if slot >= 0)
        free = min(set(range(256)) - set(written))
        slot = written[0] if index == "written" else free
        array = {"kq": kq, "vq": vq, "ks": ks, "vs": vs}[name]
        place = divmod(slot, 16) if array.ndim == 4 else (slot,)
        array[place] = value

    return broken


@pytest.mark.parametrize(
    ("name", "index", "value", "failing"),
    [
        # A wrong scale also decodes to other values; a code of the written rows is wrong by many steps.
        ("ks", "written", 1.0, ["5", "7"]),
        ("vs", "written", 1.0, ["5", "7"]),
        ("kq", "written", 0, ["6", "7"]),
        ("vq", "written", 0, ["6", "7"]),
        ("ks", "free", 1.0, ["8"]),
        ("vs", "free", 1.0, ["8"]),
        ("kq", "free", 0, ["6", "8"]),
        ("vq", "free", 0, ["6", "8"]),
    ],
)
def test_check_notices_a_wrong_int8_write(run, monkeypatch, queue, name, index, value, failing):
    monkeypatch.setattr(kvcache_dpex, "reshape_and_cache_quant", change(name, index, value))
    assert_noticed(run, queue, failing)


def test_check_notices_a_wrong_decode(run, monkeypatch, queue):
    """A fiftieth of a step away: of so many values, some were almost half a step away before."""

    def broken(codes, scales):
        steps = arrays.tensor_module().reshape(scales, (16, 16, 8, 1))
        return right_dequant(codes, scales) + 0.02 * arrays.as_dpnp(steps)

    monkeypatch.setattr(kvcache_dpex, "dequant_cache", broken)
    assert_noticed(run, queue, ["7"])


@pytest.mark.parametrize("options", [[], ["--device", "cpu"], ["--no-timing"]])
def test_check_is_the_command_by_default(options):
    """As a user types it, its options included."""
    lines = output_of("", arguments=["-m", "kvcache_dpex", *options]).splitlines()
    assert lines[-1].startswith("all checks hold on ")
    assert ("by dpnp indexing" in lines[-2]) == ("--no-timing" not in options)


def test_a_device_that_is_not_there():
    """One line, of the kind of every error."""
    done = run_python("", arguments=["-m", "kvcache_dpex", "check", "--device", "gpu:99"])
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: `device` 'gpu:99' names no device here; there is ")


@pytest.mark.parametrize(
    "error", [ImportError, MemoryError, OSError, RuntimeError, ValueError], ids=lambda error: error.__name__
)
def test_an_error_is_one_line(monkeypatch, capsys, error):
    def fail(device):
        raise error("told why")

    monkeypatch.setattr(devices, "queue_for", fail)
    assert main(["check"]) == 1
    assert capsys.readouterr() == ("", "error: told why\n")


BAD_INPUT = [
    *(
        (f"size {option} {value}", f"argument {option}: must be an integer >= 1, got '{value}'")
        for option in ("--num-layers", "--num-kv-heads", "--head-size", "--block-size")
        for value in ("0", "-1", "1.5", "many", "9" * 5000)
    ),
    *(
        (
            f"size --memory {value}",
            f"argument --memory: must be a number with a unit, such as 8GiB or 500MB, got '{value}'",
        )
        for value in ("8", "8G", "GiB", "8XiB", "1e3GB", "ib8")
    ),
    ("size --memory=-8GiB", "argument --memory: must be a number with a unit"),
    ("size --memory 0GiB", "argument --memory: must be at least one byte, got '0GiB'"),
    ("size extra", "unrecognized arguments: extra"),
    ("check --device", "argument --device: expected one argument"),
    ("check --no-timing=1", "argument --no-timing: ignored explicit argument '1'"),
    ("doctor --json=1", "argument --json: ignored explicit argument '1'"),
    ("doctor extra", "unrecognized arguments: extra"),
    ("kernels", "the following arguments are required: action"),
    ("kernels compile", "invalid choice: 'compile'"),
    ("kernels list extra", "unrecognized arguments: extra"),
    ("hub", "the following arguments are required: folder"),
    ("hub folder --repository", "argument --repository: expected one argument"),
    ("hub folder --repository name", "argument --repository: must be owner/name, got 'name'"),
    ("chek", "invalid choice: 'chek'"),
    ("--devise cpu", "unrecognized arguments: --devise cpu"),
]


@pytest.mark.parametrize(("line", "message"), BAD_INPUT, ids=[line[:40] for line, _ in BAD_INPUT])
def test_bad_input(capsys, line, message):
    """dvc #5591: usage and one line, exit status 2."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: ")
    assert message in printed.err


@pytest.mark.parametrize(
    "device", ["", "toaster", "cpu:9", "gpu:99999999999999999999", "cpu:-1", "opencl:cpu:0:0"]
)
def test_bad_names_of_devices(capsys, device):
    assert main(["check", f"--device={device}"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: `device` {device!r} names no device here; there is ")
    assert printed.err.count("\n") == 1


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvcache_dpex {__version__}\n"


def test_help(capsys):
    """The exit statuses, the defaults, and a text of its own for each action."""
    texts = {}
    for line in ("", "check", "doctor", "hub", "kernels", "kernels list", "kernels build", "size"):
        with pytest.raises(SystemExit) as ended:
            main([*line.split(), "--help"])
        assert ended.value.code == 0
        texts[line] = " ".join(capsys.readouterr().out.split())
    assert len(set(texts.values())) == len(texts)
    assert "exit status: 0 all is well, 1 a check fails, doctor finds a problem" in texts[""]
    assert "2 wrong usage" in texts[""]
    assert "by default the best device" in texts["check"]
    assert "by default your-" in texts["hub"]
    for default in ("32", "8", "128", "16", "8GiB"):
        assert f"by default {default} " in texts["size"]
    assert texts["kernels list"].startswith("usage: ")
    assert "kernels list [-h]" in texts["kernels list"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("line", ["check --no-timing", "doctor", "kernels list", "size", "--help"])
def test_encodings_of_the_terminal(encoding, line):
    done = run_python("", arguments=["-m", "kvcache_dpex", *line.split()], PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_the_encoding_does_not_have(tmp_path):
    arguments = ["-m", "kvcache_dpex", "hub", tmp_path / "d\N{SNOWMAN}r"]
    done = run_python("", arguments=arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "d\\u2603r" in done.stdout


def test_a_reader_that_stops_reading():
    """As `kernels list | head -1` does: no traceback."""
    code = "import sys; from kvcache_dpex.__main__ import main; sys.exit(main(['size']))"
    command = [sys.executable, "-c", code]
    # Unbuffered, each line would fail by itself and nothing would be left to flush at the end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=buffered, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_kernels_list(run):
    status, lines = run("kernels", "list")
    assert status == 0
    assert lines[0].split() == ["kernel", "bytes", "from", "capabilities"]
    entries = store.manifest()["modules"]
    expected = [
        [
            name,
            str((store.PACKAGED / f"{name}.spv").stat().st_size),
            "packaged",
            ", ".join(entry["capabilities"]),
        ]
        for name, entry in entries.items()
    ]
    assert [re.split(r"  +", line) for line in lines[1:]] == expected


@pytest.mark.parametrize(("action", "built"), [("list", 0), ("build", 1)])
def test_kernels_are_built_where_that_is_asked_for(run, monkeypatch, action, built):
    calls = []
    monkeypatch.setattr(package, "build_package", lambda: calls.append(action))
    monkeypatch.setattr(package, "catalogue", list)
    assert run("kernels", action, "--json") == (0, ["[]"])
    assert len(calls) == built


def test_kernels_list_as_json(run):
    status, lines = run("kernels", "list", "--json")
    assert status == 0
    entries = store.manifest()["modules"]
    assert [(row["kernel"], row["capabilities"]) for row in json.loads("\n".join(lines))] == [
        (name, entry["capabilities"]) for name, entry in entries.items()
    ]


def test_kernels_that_come_from_nowhere(run, monkeypatch):
    monkeypatch.setattr(compiler, "available", lambda: False)
    monkeypatch.setattr(store, "packaged", lambda wanted: None)
    edits.forget()
    status, lines = run("kernels", "list")
    assert status == 0
    rows = [line for line in lines if "nowhere" in line]
    assert len(rows) == len(package.catalogue())
    assert all("pip install 'kvcache_dpex[jit]' (Python 3.9 to 3.11)" in row for row in rows)


@pytest.mark.skipif(not compiler.available(), reason="compiling needs numba-dpex")
def test_kernels_build_writes_what_the_package_holds(monkeypatch, tmp_path):
    """Three kernels into an empty folder: the same files and entries as the package's."""
    chosen = package.catalogue()[:3]
    entries = store.manifest()["modules"]
    packaged = store.PACKAGED
    monkeypatch.setattr(package, "catalogue", lambda: chosen)
    monkeypatch.setattr(store, "PACKAGED", tmp_path)
    (tmp_path / "stale.spv").write_bytes(b"")
    try:
        modules = package.build_package()
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


SIZES = [
    "32 layers, 8 heads of 128, keys and values, blocks of 16, in 8,589,934,592 bytes (8.00 GiB)",
    "format bytes a token blocks tokens times smaller than float32 than float16",
    "float32 262,144 2,048 32,768 1.00 0.50",
    "float16 131,072 4,096 65,536 2.00 1.00",
    "bfloat16 131,072 4,096 65,536 2.00 1.00",
    "float8_e4m3fn 65,536 8,192 131,072 4.00 2.00",
    "float8_e5m2 65,536 8,192 131,072 4.00 2.00",
    "int8_per_token_head 67,584 7,943 127,088 3.88 1.94",
    "fp8_per_token_head 67,584 7,943 127,088 3.88 1.94",
]


def test_size(run):
    status, lines = run("size")
    assert (status, [re.sub(" +", " ", line) for line in lines]) == (0, SIZES)


def test_size_counts_whole_blocks(run):
    """One byte short of two blocks of 7 slots in each format is one block."""
    options = ["--num-layers=3", "--num-kv-heads=2", "--head-size=5", "--block-size=7", "--json"]
    for name, per_token in (("float32", 240), ("float16", 120), ("int8_per_token_head", 108)):
        for memory, blocks in ((2 * 7 * per_token, 2), (2 * 7 * per_token - 1, 1)):
            status, lines = run("size", *options, f"--memory={memory}B")
            row = {row["format"]: row for row in json.loads("\n".join(lines))}[name]
            assert status == 0
            assert row["bytes_per_token"] == per_token
            assert (row["num_blocks"], row["num_tokens"]) == (blocks, 7 * blocks)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1B", 1),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("500MB", 500 * 10**6),
        ("3MiB", 3 * 2**20),
        ("1.5gb", 15 * 10**8),
        (" 24 GiB ", 24 * 2**30),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
    ],
)
def test_sizes_with_their_units(text, expected):
    assert arguments.size(text) == expected


def test_hub_asks_before_it_writes_into_a_folder_with_files(run, capsys, tmp_path):
    (tmp_path / "notes.txt").touch()
    assert main(["hub", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path} is not empty: name another folder, or --force to replace the repository in it\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    status, lines = run("hub", str(tmp_path), "--force", "--repository", "me/kv")
    assert (status, lines) == (0, [f'LOCAL_KERNELS="me/kv={tmp_path}" makes get_kernel load it from here'])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "build", "notes.txt"]


@pytest.mark.parametrize("folder", ["/proc/nowhere/hub", "/dev/null", "/dev/null/hub", "x" * 300])
def test_hub_in_a_folder_that_cannot_be_made(capsys, folder):
    assert main(["hub", folder]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"error: .*(nowhere|null|xxx).*\n", printed.err)


def test_a_table_is_aligned_and_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    output.print_table(["a", "bc"], [["long identifier", 1], ["", "x"]])
    assert capsys.readouterr().out == "a                bc\nlong identifier  1\n                 x\n"
