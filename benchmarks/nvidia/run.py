"""Verify, sanitize and time what `translate` wrote: ``python -m benchmarks.nvidia.run FOLDER --output FILE``.

`--parts` does some of it; what the file has of the same modules is kept, and every run of the bandwidth.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

import kvcache_dpex
from tests.gates.standin import Array, Device, Queue, launches_through

from . import rivals, verify
from .cuda import Translated
from .table import below_the_bars, medians

HEADS, SIZE, BLOCK_SIZE = 8, 128, 16
TOKENS = (8, 512, 4096, 65536)
DTYPES = {"float32": torch.float32, "float16": torch.float16}
# Every replay walks over this many bytes of different inputs, several times what the L2 cache holds.
WORKING_SET = 512 << 20
MOST_SETS = 32
ROUNDS = 15


def as_array(tensor: torch.Tensor, queue: Queue) -> Array:
    """A CUDA tensor as the operations see it."""
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    step = np.zeros(1, dtype)
    strides = [stride * dtype.itemsize for stride in tensor.stride()]
    layout = np.lib.stride_tricks.as_strided(step, tuple(tensor.shape), strides)
    return Array(layout, tensor.data_ptr(), queue)


class Work:
    """One operation on one size: inputs enough that no replay finds them in the cache."""

    def __init__(self, operation: str, dtype: str, tokens: int) -> None:
        self.operation, self.dtype, self.tokens = operation, dtype, tokens
        values, width = tokens * HEADS * SIZE, DTYPES[dtype].itemsize
        scales = tokens * HEADS * 4
        self.bytes = {
            "write": 4 * values * width + 8 * tokens,
            "quantize": 2 * values * (width + 1) + 2 * scales + 8 * tokens,
            "dequantize": values * (width + 1) + scales,
        }[operation]
        self.sets = [self._inputs() for _ in range(max(2, min(MOST_SETS, WORKING_SET // self.bytes)))]

    def _inputs(self) -> dict[str, torch.Tensor]:
        rows = (self.tokens, HEADS, SIZE)
        blocks = -(-self.tokens // BLOCK_SIZE)
        cache = (blocks, BLOCK_SIZE, HEADS, SIZE)
        scales = (blocks * BLOCK_SIZE, HEADS)
        kind = DTYPES[self.dtype]
        if self.operation == "dequantize":
            return {
                "q": torch.randint(-127, 128, cache, dtype=torch.int8, device="cuda"),
                "scales": torch.rand(scales, device="cuda"),
                "out": torch.empty(cache, dtype=kind, device="cuda"),
            }
        arguments = {name: torch.randn(rows, device="cuda").to(kind) for name in ("key", "value")}
        if self.operation == "write":
            outputs = {
                name: torch.zeros(cache, dtype=kind, device="cuda") for name in ("key_cache", "value_cache")
            }
        else:
            outputs = {name: torch.zeros(cache, dtype=torch.int8, device="cuda") for name in ("kq", "vq")}
            outputs.update({name: torch.zeros(scales, device="cuda") for name in ("ks", "vs")})
        slots = torch.randperm(blocks * BLOCK_SIZE, device="cuda")[: self.tokens]
        return {**arguments, **outputs, "slot_mapping": slots}

    def ours(self, arguments: dict[str, torch.Tensor], queue: Queue) -> None:
        name = {
            "write": "reshape_and_cache",
            "quantize": "reshape_and_cache_quant",
            "dequantize": "dequant_cache",
        }
        arrays = {key: as_array(tensor, queue) for key, tensor in arguments.items()}
        getattr(kvcache_dpex, name[self.operation])(**arrays)

    def written(self, arguments: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        inputs = {"key", "value", "slot_mapping", "q", "scales"}
        return [tensor for name, tensor in arguments.items() if name not in inputs]


def outputs_of(work: Work, run: Callable[[dict], Any]) -> list[torch.Tensor]:
    """What a contender writes over zeros, for the first set."""
    arguments = work.sets[0]
    for tensor in work.written(arguments):
        tensor.zero_()
    run(arguments)
    return [tensor.clone() for tensor in work.written(arguments)]


def captured(work: Work, run: Callable[[dict], Any]) -> torch.cuda.CUDAGraph:
    """A graph with one call for every set."""
    run(work.sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in work.sets:
            run(arguments)
    return graph


def microseconds(replays: dict[str, Callable[[], Any]], calls: int) -> dict[str, list[float]]:
    """Times of one call, the contenders one after the other in every round."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for number in range(ROUNDS + 2):
        for name, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            if number >= 2:
                times[name].append(begin.elapsed_time(end) * 1000 / calls)
    return times


def ceiling() -> float:
    """Bytes a second, read and written, of a copy from device memory to device memory."""
    source = torch.zeros(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = microseconds({"copy": lambda: target.copy_(source)}, 1)["copy"]
    return 2 * source.numel() / (statistics.median(times) * 1e-6)


def measure(work: Work, queue: Queue, copy: float) -> dict[str, Any]:
    """One row of the table."""
    triton = getattr(rivals, f"triton_{work.operation}")
    eager = getattr(rivals, f"torch_{work.operation}")
    contenders: dict[str, Callable[[dict], Any]] = {"ours": lambda arguments: work.ours(arguments, queue)}
    for choice in rivals.CHOICES:
        contenders[f"triton {choice}"] = lambda arguments, choice=choice: triton(choice, *arguments.values())
    contenders["torch"] = lambda arguments: eager(*arguments.values())
    expected = outputs_of(work, contenders["ours"])
    different = {}
    for name, run in contenders.items():
        pairs = zip(outputs_of(work, run), expected)
        different[name] = sum(int((ours != theirs).sum()) for ours, theirs in pairs)
    graphs = {name: captured(work, run) for name, run in contenders.items()}
    times = microseconds({name: graph.replay for name, graph in graphs.items()}, len(work.sets))
    median = {name: statistics.median(found) for name, found in times.items()}
    best = min((name for name in median if name.startswith("triton")), key=median.__getitem__)
    speed = work.bytes / (median["ours"] * 1e-6)
    low, high = np.quantile(times["ours"], [0.25, 0.75])
    return {
        "work": work.operation,
        "dtype": work.dtype,
        "tokens": work.tokens,
        "us": round(median["ours"], 2),
        "quartiles_us": [round(float(low), 2), round(float(high), 2)],
        "gb_per_s": round(speed / 1e9, 1),
        "of_copy": round(speed / copy, 3),
        "triton_us": round(median[best], 2),
        "triton_over_ours": round(median[best] / median["ours"], 3),
        "torch_over_ours": round(median["torch"] / median["ours"], 2),
        "different": {name: count for name, count in different.items() if count},
    }


def environment(translated: Translated) -> dict[str, Any]:
    """Where and with what this ran."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": translated.list["commit"],
        "digest": translated.list["digest"],
        "modules": len(translated.list["modules"]),
        "versions": {
            "driver": driver[0] if driver else "unknown",
            **{name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy")},
        },
    }


def bandwidth(translated: Translated) -> dict[str, Any]:
    """The copy's speed, every row of the table, and what is below the bars."""
    copy = ceiling()
    print(f"copy: {copy / 1e9:.1f} GB/s", flush=True)
    queue = Queue(Device())
    rows = []
    with launches_through(translated.launcher):
        for operation in ("write", "quantize", "dequantize"):
            for dtype in DTYPES:
                for tokens in TOKENS:
                    rows.append(measure(Work(operation, dtype, tokens), queue, copy))
                    print(json.dumps(rows[-1]), flush=True)
                    torch.cuda.empty_cache()
    return {"copy_gb_per_s": round(copy / 1e9, 1), "rows": rows}


def main() -> None:
    parts: dict[str, Callable[[Translated], Any]] = {
        "verified": lambda translated: verify.run_cases(translated, verify.every_case()),
        "sanitizer_errors": lambda translated: verify.sanitize(translated.folder),
        "bandwidth": bandwidth,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what `translate` wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    options = parser.parse_args()
    translated = Translated(options.folder)
    report = environment(translated)
    if options.output.exists():
        earlier = json.loads(options.output.read_text())
        if earlier["digest"] == report["digest"]:
            report = {**earlier, **report}
    for name in options.parts:
        found = parts[name](translated)
        # Where arrays come to lie in memory changes from run to run: every run of the bandwidth is kept.
        report[name] = [*report.get(name, []), found] if name == "bandwidth" else found
        print(name, json.dumps(found), flush=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    if "bandwidth" in report:
        print("below the bars:", below_the_bars(medians(report["bandwidth"])))


if __name__ == "__main__":
    main()
