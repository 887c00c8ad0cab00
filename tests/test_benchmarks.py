"""The benchmark command: it verifies before it times, says on what, and writes what it shows."""

import json
import mmap
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import attention, blocks, contenders, memory, moves, presets
from benchmarks.contenders import ENTRIES, OURS, Entry
from benchmarks.measure import Timing
from benchmarks.report import Result, table_of
from benchmarks.work import Absent, Work
from helpers import ROOT, output_of

QUICK = ["--seconds", "0.01", "--skip", "torch", "--skip", "vLLM", "--skip", "numba"]


def torch_module():
    import kvcache_dpex.torch

    return kvcache_dpex.torch


def run(tmp_path, *arguments):
    """Exit status and what the JSON file says."""
    file = tmp_path / "found.json"
    status = command.main([*arguments, *QUICK, "--json", str(file)])
    return status, json.loads(file.read_text())


def test_table_is_verified_measured_and_written(tmp_path, queue, capsys):
    status, found = run(tmp_path)
    assert status == 0
    assert [case["case"]["operation"] for case in found["cases"]] == ["write", "int8"]
    for case in found["cases"]:
        assert case["contenders"][OURS]["samples"] >= 15
        assert all(
            0 < each["lower"] <= each["median"] <= each["upper"] for each in case["contenders"].values()
        )
    conditions = found["conditions"]
    assert conditions["device"] == queue.sycl_device.name
    assert conditions["driver"] == queue.sycl_device.driver_version
    assert {"commit", "kvcache_dpex", "dpctl", "dpnp", "host cores", "load average"} <= conditions.keys()
    assert OURS in capsys.readouterr().out


def test_an_unknown_preset_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["chart"])
    assert "argument preset: must be one of table, decode, prefill" in capsys.readouterr().err


def test_a_wrong_contender_is_not_timed(tmp_path, monkeypatch):
    """One bit of one cache differs."""

    def set_up(work):
        given = work.arrays

        def write_and_spoil():
            contenders.write.kv.reshape_and_cache(**given)
            given["value_cache"][-1, -1, -1, -1] = 1

        return work.on_device(write_and_spoil)

    right = ENTRIES["write"][0]
    monkeypatch.setitem(ENTRIES, "write", [right, Entry("spoiler", "rival", set_up)])
    status, found = run(tmp_path, "table")
    assert status == 1
    assert list(found["cases"][0]["contenders"]) == [right.name]
    assert found["cases"][0]["absent"]["spoiler"].startswith(
        "wrong: `value_cache` differs from the reference in"
    )


@pytest.mark.parametrize("operation", ["write", "int8", "dequantize"])
def test_every_contender_agrees_with_the_reference(queue, operation):
    """Torch's too, where it is installed; torch.compile takes a minute and is left to the command."""
    work = Work(presets.Case(operation, 3, heads=2, size=16), queue)
    agreed = []
    for name, kind, set_up in ENTRIES[operation]:
        if "compile" in name or kind not in ("ours", "rival"):
            continue
        try:
            contender = set_up(work)
        except Absent:
            continue
        work.verify(contender)
        agreed.append(name)
    assert OURS in agreed


def test_bytes_that_an_operation_must_move():
    """By hand: two tensors of 8 rows of 4096 bytes, each read and written, and 8 slots of 8 bytes."""
    assert presets.Case("write", 8).num_bytes == 2 * 2 * 8 * 4096 + 64
    assert presets.Case("int8", 8).num_bytes == 2 * (8 * 4096 + 8 * 1024 + 8 * 8 * 4) + 64
    assert presets.Case("dequantize", 64, dtype="float16").num_bytes == 64 * (1024 + 2048 + 32)


def test_every_preset_is_described():
    assert presets.PRESETS.keys() == presets.DESCRIPTIONS.keys()
    assert presets.cases_of(["table", "decode"])[:2] == presets.PRESETS["table"]


def test_each_figure_stands_under_its_name():
    case = presets.Case("write", 8)
    timings = {"ours": Timing(10, 9, 12, 50, first=40), "copy": Timing(5, 4, 6, 50, first=7)}
    result = Result(case, timings, {"ours": "ours", "copy": "copy"}, dict.fromkeys(timings, "here"), {})
    table = table_of(result)
    shown = {column.header: list(column.cells) for column in table.columns}
    rates = [f"{case.num_bytes / time / 1e3:.2f}" for time in (5, 10)]
    assert shown == {
        "contender": ["copy", "ours"],
        "on": ["here", "here"],
        "median us": ["5.0", "10.0"],
        "quartiles us": ["4.0 - 6.0", "9.0 - 12.0"],
        "first call us": ["7.0", "40.0"],
        "GB/s": rates,
        "time / ours": ["0.50", "1.00"],
    }
    assert table.title == "write, 8 tokens x 8 heads x 128, float32"


def test_a_narrow_terminal(queue, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    command.main(["table", *QUICK])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_charts(tmp_path):
    """Bars for single cases, lines for three token counts and more."""
    pytest.importorskip("matplotlib", reason="charts need the extra `bench`")
    file = tmp_path / "chart.svg"
    assert command.main(["table", "decode", *QUICK, "--chart", str(file)]) == 0
    text = file.read_text()
    assert text.count('<g id="axes_') == 2
    assert "fastest copy of the same bytes" in text
    assert "shorter is better" in text


@pytest.mark.parametrize("case", [*presets.PRESETS["random"], *presets.PRESETS["prefill"]], ids=str)
def test_slots_are_distinct_and_a_prefill_fills_blocks(case):
    slots = case.slot_mapping(np.random.default_rng(0))
    assert len(set(slots.tolist())) == case.tokens
    assert slots.max() < case.num_blocks * case.block_size
    steps = np.diff(slots.reshape(-1, case.block_size), axis=1)
    assert (steps == 1).all() == (not case.random_slots)


def test_breakdown_prints_every_part():
    printed = output_of("", arguments=["-m", "benchmarks.breakdown", "--seconds", "0.2"])
    parts = "its launch alone", "all slots negative", "five arrays read", "wait for the kernel"
    assert [part for part in parts if part not in printed] == []
    assert ("torch.reshape_and_cache without a launch" in printed) == (find_spec("torch") is not None)


def test_growth_is_seen(queue):
    leak = []

    def take():
        # Fresh pages, where an allocator would hand out again what earlier tests gave back.
        leak.append(mmap.mmap(-1, 50_000))
        leak[-1].write(bytes(50_000))

    before, halfway, after, peak = memory._follow(take, 2000, "leak", Console(quiet=True), queue)
    assert peak >= after > halfway + 1000 * 40_000
    assert halfway > before + 1000 * 40_000


def test_bench_is_a_script_of_its_own():
    pytest.importorskip("torch", reason="bench.py measures the operations on torch tensors")
    script = ROOT / "benchmarks" / "bench.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.count("bit-exact") == 3
    assert "0.258 of the bytes of torch.float32" in done.stdout


def test_blocks_are_timed_without_vllm(capsys):
    assert blocks.main(["--rounds", "1", "--total", "300"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[3:]] == [
        *["blocks, handed out and freed"] * 3,
        *["sequences, allocated and freed"] * 3,
        *["hashed, cached, evicted"] * 2,
    ]


def test_vllm_is_looked_for_where_it_was_said_to_be(tmp_path):
    with pytest.raises(SystemExit, match=r"has no vllm/v1/core/block_pool.py; --help says how to get it$"):
        blocks.main(["--vllm", str(tmp_path)])


@pytest.mark.parametrize("name", command.PROGRAMS)
def test_programs_are_subcommands(name, capsys, monkeypatch):
    if name in ("generation", "transfer"):
        pytest.importorskip("torch", reason=f"benchmarks.{name} measures tensors")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    with pytest.raises(SystemExit) as end:
        command.main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_attention_is_compared_with_torch(dtype, num_tokens, monkeypatch):
    pytest.importorskip("torch", reason="torch is what paged attention is measured beside")
    shape = attention.Shape(2 if num_tokens == 1 else 1, 5, num_tokens, 4, 2, 32)
    found = attention.contenders(shape, dtype)
    folded = ["SDPA folded", "read floor"] if num_tokens == 1 else []
    assert list(found) == ["paged_attention", "gather + SDPA", "SDPA", *folded]
    twice = found["paged_attention"]() * 2
    monkeypatch.setattr(torch_module(), "paged_attention", lambda *given, **named: twice)
    with pytest.raises(SystemExit, match=r"^paged_attention is wrong by "):
        attention.contenders(shape, dtype)


def test_moves_are_compared_with_torch(monkeypatch):
    pytest.importorskip("torch", reason="torch's copies are what moves are measured beside")
    monkeypatch.setattr(moves, "NUM_BLOCKS", 6)
    monkeypatch.setattr(moves, "PAIRS", 2)
    found, size = moves.contenders("int8_per_token_head")
    assert size == moves.LAYERS * 2 * 2 * 16 * 8 * (128 + 4)
    assert len(found) == 5
    monkeypatch.setattr(torch_module(), "copy_blocks", lambda *given: None)
    with pytest.raises(SystemExit, match="leave different caches"):
        moves.contenders("int8_per_token_head")


def test_an_unknown_device_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--device", "fpga"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m benchmarks: error: `device` 'fpga' names no device here; there is ")
