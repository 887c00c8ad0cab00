"""Where the microseconds of a small write go: 8 tokens, 8 heads, 128, float32.

    python -m benchmarks breakdown

Stages are timed inside of one another, so their sum is larger than the whole by the cost of the clock.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Callable

from rich.console import Console
from rich.table import Table

import kvcache_dpex as kv
from kvcache_dpex.ops.calls import Plan, launch_of
from kvcache_dpex.ops.operation import OPERATIONS, using
from kvcache_dpex.ops.write import reshape_and_cache  # noqa: F401  (declares the operation)
from kvcache_dpex.runtime.launch import launch
from kvcache_dpex.runtime.launch.arrays import read

from .contenders import torch_operations
from .floor import empty_launch
from .measure import Timing, conditions, measure, stages
from .opencl import LaunchOfModule, opencl_launch
from .presets import Case
from .work import Absent, Contender, Work, queue_for

WRITE = OPERATIONS["reshape_and_cache"]


def main() -> int:
    """Print two tables: whole things beside each other, and the stages of one call."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks breakdown", description=__doc__)
    parser.add_argument("--device", help="a dpctl filter string; default: the best device")
    parser.add_argument("--seconds", type=float, default=5.0, help="default: %(default)s")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    work = Work(Case("write", 8), queue_for(options.device))
    console.print(
        ", ".join(f"{name} {value}" for name, value in conditions(work.queue).items()), highlight=False
    )
    wholes = _wholes(work)
    *_, (_, timings) = measure(wholes, options.seconds)
    console.print(_table("whole calls, each with its wait", timings))
    console.print(_table("stages of one call", stages(_staged(work), options.seconds)))
    return 0


def _wholes(work: Work) -> dict[str, Contender]:
    a = work.arrays
    pointers, prepared = _prepared(a)
    empty, what = empty_launch(work.queue)
    other = Work(work.case._replace(block_size=32), work.queue)
    wholes: dict[str, Callable[[], Any]] = {
        "reshape_and_cache": lambda: kv.reshape_and_cache(**a),
        "its launch alone": lambda: prepared(pointers, a),
        "its launch, all slots negative": _skipping(work, prepared, pointers),
        f"launch of {what}": empty,
        "reshape_and_cache without a launch": _without_launch(kv.reshape_and_cache, other.arrays),
    }
    if work.sycl_device == "CPU":
        try:
            wholes["its launch through OpenCL alone, without SYCL"] = opencl_launch(prepared, pointers)
        except Absent as reason:
            Console(stderr=True).print(f"no launch through OpenCL alone: {reason}")
    return {**{name: work.on_device(run, ()) for name, run in wholes.items()}, **_on_tensors(work, other)}


def _on_tensors(work: Work, other: Work) -> dict[str, Contender]:
    """The same on torch tensors, by the package's own name and by that of `kvcache_dpex.torch`."""
    try:
        t, operation = work.tensors, torch_operations().reshape_and_cache
    except Absent as reason:
        Console(stderr=True).print(f"nothing of torch tensors: {reason}")
        return {}
    runs: dict[str, Callable[[], Any]] = {
        "reshape_and_cache on tensors": lambda: kv.reshape_and_cache(**t),
        "torch.reshape_and_cache": lambda: operation(**t),
        "torch.reshape_and_cache without a launch": _without_launch(operation, other.tensors),
    }
    return {name: work.on_torch(run, ()) for name, run in runs.items()}


def _prepared(arguments: dict[str, Any]) -> tuple[tuple[int, ...], LaunchOfModule]:
    """Pointers and launch of a write."""
    made: list[Any] = []

    def launch_of_module(plan: Plan) -> Any:
        made.append(launch_of(plan, new=LaunchOfModule))
        return made[-1]

    with using(launch=launch_of_module):
        kv.reshape_and_cache(**arguments)
    (prepared,) = made
    return tuple(read(arguments[array.name], array.name)[0] for array in WRITE.arrays), prepared


def _skipping(work: Work, prepared: launch.Launch, pointers: tuple[int, ...]) -> Callable[[], None]:
    """The same launch where every token is skipped: arguments, but no work."""
    negative = work.arrays["slot_mapping"] * 0 - 1
    skipped = (*pointers[:-1], read(negative, "slot_mapping")[0])
    return lambda: prepared(skipped, negative)


def _without_launch(operation: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[], None]:
    """The operation on arguments of a new shape, for which the launch is replaced by nothing."""
    before = set(WRITE.prepared)
    operation(**arguments)
    (key,) = set(WRITE.prepared) - before
    kind = WRITE.prepared[key]
    kind.update(dict.fromkeys(kind, launch.nothing))
    return lambda: operation(**arguments)


def _staged(work: Work) -> Callable[[Callable[[str], None]], None]:
    """One call, which says when each stage has ended."""
    given = tuple(work.arrays[array.name] for array in WRITE.arrays)
    kv.reshape_and_cache(*given)

    def run(ended: Callable[[str], None]) -> None:
        addresses, fields = zip(*WRITE.read(given))
        ended("five arrays read")
        found = WRITE.prepared[fields, (False,)][addresses]
        ended("launch looked up")
        arguments = found._packer.pack(addresses)
        ended("arguments packed")
        found.order.before()
        ended("wait for earlier work")
        event = found.submit(arguments)
        ended("submission by SYCL")
        found.order.after(event, None)
        ended("wait for the kernel")
        del event
        found._packer.reuse(arguments)
        ended("deletion of the event")

    return run


def _table(title: str, timings: dict[str, Timing]) -> Table:
    table = Table("what", "median us", "quartiles us", title=title)
    for name, timing in timings.items():
        table.add_row(name, f"{timing.median:.1f}", f"{timing.lower:.1f} - {timing.upper:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
