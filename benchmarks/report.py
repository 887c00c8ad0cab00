"""Shows results: a table, JSON, charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from .measure import Timing
from .presets import Case

COLUMNS = "contender", "on", "median us", "quartiles us", "first call us", "GB/s", "time / ours"


class Result(NamedTuple):
    """One case: timings of those that took part, and why the others did not."""

    case: Case
    timings: dict[str, Timing]
    kinds: dict[str, str]
    devices: dict[str, str]
    absent: dict[str, str]

    def ceiling(self) -> float | None:
        """Bytes per second of the fastest copy."""
        copies = [timing.median for name, timing in self.timings.items() if self.kinds[name] == "copy"]
        return self.case.num_bytes / min(copies) * 1e6 if copies else None


def table_of(result: Result) -> Table:
    """Fastest first; how many times as long as ours each takes."""
    ours = next(iter(result.timings.values())).median
    table = Table(*COLUMNS, title=str(result.case))
    for name, timing in sorted(result.timings.items(), key=lambda item: item[1].median):
        kind = result.kinds[name]
        rate = "" if kind == "floor" else f"{result.case.num_bytes / timing.median / 1e3:.2f}"
        table.add_row(
            name,
            result.devices[name],
            f"{timing.median:.1f}",
            f"{timing.lower:.1f} - {timing.upper:.1f}",
            f"{timing.first:.1f}",
            rate,
            f"{timing.median / ours:.2f}",
            style={"ours": "bold", "copy": "dim", "floor": "dim"}.get(kind),
        )
    for name, reason in result.absent.items():
        table.add_row(f"{name}: {reason}", style="yellow")
    return table


def write_json(path: Path, conditions: dict[str, Any], results: list[Result]) -> None:
    """Everything that was found; times in microseconds."""
    cases = [
        {
            "case": result.case._asdict(),
            "bytes": result.case.num_bytes,
            "contenders": {
                name: {"kind": result.kinds[name], "device": result.devices[name], **timing._asdict()}
                for name, timing in result.timings.items()
            },
            "absent": result.absent,
        }
        for result in results
    ]
    path.write_text(json.dumps({"conditions": conditions, "cases": cases}, indent=1) + "\n")


def draw(path: Path, conditions: dict[str, Any], results: list[Result]) -> None:
    """A panel a family of cases: lines over the tokens where there are three or more, else bars for each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    families: dict[Any, list[Result]] = {}
    for result in results:
        families.setdefault(result.case._replace(tokens=0), []).append(result)
    for key, family in list(families.items()):
        if len(family) == 2:
            del families[key]
            families.update({result.case: [result] for result in family})
    figure, axes = pyplot.subplots(
        len(families), 1, figsize=(11, 5 * len(families)), squeeze=False, layout="constrained"
    )
    for axis, family in zip(axes[:, 0], families.values()):
        (_lines if len(family) > 2 else _bars)(axis, family)
    device, host = conditions["device"], conditions["host processor"]
    host = "" if device == host else f", host {host}"
    figure.suptitle(f"{conditions['device type']}: {device}{host}, {conditions['host cores']} host cores")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _lines(axis: Any, family: list[Result]) -> None:
    """Bandwidth over tokens, with the fastest copy as the ceiling."""
    family = sorted(family, key=lambda result: result.case.tokens)
    tokens = [result.case.tokens for result in family]
    for name in dict.fromkeys(name for result in family for name in result.timings):
        kind = next(result.kinds[name] for result in family if name in result.timings)
        if kind in ("ours", "rival"):
            rates = [_rate(result, name) for result in family]
            axis.plot(tokens, rates, marker="o", linewidth=2.5 if kind == "ours" else 1, label=name)
    ceilings = [(result.ceiling() or float("nan")) / 1e9 for result in family]
    axis.plot(tokens, ceilings, "k--", label="fastest copy of the same bytes")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GB/s, read and written (higher is better)")
    axis.set_xticks(tokens, [str(count) for count in tokens])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_title(str(family[0].case._replace(tokens=0)).replace(" 0 tokens x", ""))
    axis.grid(visible=True, which="both", alpha=0.3)
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _rate(result: Result, name: str) -> float:
    timing = result.timings.get(name)
    return result.case.num_bytes / timing.median / 1e3 if timing else float("nan")


def _bars(axis: Any, family: list[Result]) -> None:
    """Time of each contender, shortest on top, with quartiles."""
    from matplotlib import pyplot

    (result,) = family
    rows = [(timing.median, timing, name, result.kinds[name]) for name, timing in result.timings.items()]
    rows.sort(key=lambda row: -row[0])
    colours = {"ours": "tab:blue", "rival": "tab:gray", "copy": "tab:green", "floor": "tab:olive"}
    medians = [row[0] for row in rows]
    spread = [[row[0] - row[1].lower for row in rows], [row[1].upper - row[0] for row in rows]]
    bars = axis.barh([row[2] for row in rows], medians, xerr=spread, color=[colours[row[3]] for row in rows])
    axis.bar_label(bars, [f"{median:.3g}" for median in medians], padding=6)
    axis.set(xlabel="microseconds, median and quartiles (shorter is better)", title=str(result.case))
    axis.set_xlim(0, 1.15 * max(row[1].upper for row in rows))
    axis.grid(visible=True, axis="x", alpha=0.3)
    kinds = {"ours": "this package", "rival": "others", "copy": "copy of the bytes", "floor": "empty launch"}
    shown = [kind for kind in kinds if kind in {row[3] for row in rows}]
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in shown]
    axis.legend(patches, [kinds[kind] for kind in shown], fontsize="small", loc="best")
