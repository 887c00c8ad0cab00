"""Measure this package beside what people would use instead.

    python -m benchmarks table --chart table.png --json table.json

Every contender's output is compared with the reference, byte for byte, before it is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .bars import verdicts
from .contenders import ENTRIES
from .measure import conditions, measure
from .presets import DESCRIPTIONS, PRESETS, Case, cases_of
from .report import Result, draw, table_of, write_json
from .work import Absent, Contender, Work, Wrong, queue_for

PROGRAMS = {
    "attention": "paged attention beside torch's",
    "blocks": "the block manager beside vLLM's",
    "breakdown": "where the microseconds of a small write go",
    "generation": "decode steps of SmolLM2 in transformers, from several caches",
    "memory": "memory over 100,000 calls, and of caches",
    "moves": "blocks copied in every layer, beside plain copies",
    "transfer": "blocks sent between two processes",
    "vllm_steps": "decode steps of vLLM, with its attention and ours",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the presets; 1 where a contender's output is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] and arguments[0] in PROGRAMS:
        sys.argv = [f"python -m benchmarks {arguments[0]}", *arguments[1:]]
        return import_module(f".{arguments[0]}", __package__).main() or 0
    parser = _parser()
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
    try:
        queue = queue_for(options.device)
    except ValueError as reason:
        parser.error(str(reason))
    found = conditions(queue)
    console.print(", ".join(f"{name} {value}" for name, value in found.items()), highlight=False)
    results = []
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        cases = cases_of(options.presets)
        overall = progress.add_task("all cases", total=len(cases))
        for case in cases:
            result = _run(case, queue, options, progress)
            results.append(result)
            progress.console.print(table_of(result))
            progress.advance(overall)
    _print_verdicts(console, results)
    if options.json:
        write_json(options.json, found, results)
    for path in options.chart:
        draw(path, found, results)
    return int(any(reason.startswith("wrong") for result in results for reason in result.absent.values()))


def _run(case: Case, queue: Any, options: argparse.Namespace, progress: Progress) -> Result:
    task = progress.add_task(f"{case}: verifying", total=options.seconds)
    work = Work(case, queue)
    result = Result(case, {}, {}, {}, {})
    contenders: dict[str, Contender] = {}
    for name, kind, set_up in ENTRIES[case.operation]:
        if any(word in name for word in options.skip):
            continue
        progress.update(task, description=f"{case}: verifying {name}")
        try:
            contender = set_up(work)
            if kind in ("ours", "rival"):
                work.verify(contender)
        except (Absent, Wrong) as reason:
            result.absent[name] = f"wrong: {reason}" if isinstance(reason, Wrong) else str(reason)
            continue
        contenders[name], result.kinds[name], result.devices[name] = contender, kind, contender.device
    progress.update(task, description=f"{case}: measuring")
    for elapsed, timings in measure(contenders, options.seconds):
        result.timings.update(timings)
        progress.update(task, completed=min(options.seconds, elapsed))
    progress.remove_task(task)
    return result


def _print_verdicts(console: Console, results: list[Result]) -> None:
    found = verdicts(results)
    if found:
        table = Table("goal", "wanted", "found", "", title="goals of the project on a CPU device")
        for what, wanted, measured, reached in found:
            table.add_row(what, wanted, measured, "reached" if reached else "missed")
        console.print(table)


def _preset(name: str) -> str:
    if name not in PRESETS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(PRESETS)}, got {name!r}")
    return name


def _parser() -> argparse.ArgumentParser:
    listed, programs = (
        "\n".join(f"  {name:<11} {text}" for name, text in each.items()) for each in (DESCRIPTIONS, PROGRAMS)
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"presets:\n{listed}\n\nprograms of their own, with options of their own:\n{programs}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "presets",
        nargs="*",
        default=["table"],
        type=_preset,
        metavar="preset",
        help="default: table",
    )
    parser.add_argument("--device", help="a dpctl filter string; default: the best device")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each case; default: %(default)s")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="WORD", help="leave out contenders with this word"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument(
        "--chart",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="draw a .png or .svg; may repeat",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
