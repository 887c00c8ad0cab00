"""What a report says, as a table: ``python -m benchmarks.nvidia.table [FILE]``."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from kvcache_dpex.runtime.compile import store

RESULTS = Path(__file__).with_name("results.json")
# What the largest size must show: parts of the copy's speed, and of the best Triton kernel's.
BARS = {
    ("write", "float32"): 0.90,
    ("write", "float16"): 0.90,
    ("quantize", "float32"): 0.93,
    ("quantize", "float16"): 0.85,
    ("dequantize", "float32"): 0.85,
    ("dequantize", "float16"): 0.85,
}
TRITON_BAR = 0.95


def digest_of_modules() -> str:
    """What changes whenever a packaged module does."""
    modules = store.manifest()["modules"]
    text = "".join(f"{name} {modules[name]['sha256']}\n" for name in sorted(modules))
    return hashlib.sha256(text.encode()).hexdigest()


def below_the_bars(rows: list[dict[str, Any]]) -> list[str]:
    """Which of `medians`'s rows do not show what they must."""
    found = []
    largest = max(row["tokens"] for row in rows)
    for row in rows:
        name = f"{row['work']} {row['dtype']} {row['tokens']}"
        if row["different"]:
            found.append(f"{name}: outputs differ from ours, {row['different']}")
        if row["tokens"] < largest:
            continue
        bar = BARS[row["work"], row["dtype"]]
        if row["of_copy"] < bar:
            found.append(f"{name}: {row['of_copy']} of the copy, below {bar}")
        if row["triton_over_ours"] < TRITON_BAR:
            found.append(f"{name}: {row['triton_over_ours']} of Triton's speed, below {TRITON_BAR}")
    return found


def medians(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row of several runs' tables: the median of each figure, and the ends of the copy's part.

    >>> rows = [{"work": "write", "us": us, "of_copy": 9 / us, "different": {}} for us in (10, 12, 11)]
    >>> medians([{"rows": [row]} for row in rows])
    [{'work': 'write', 'us': 11, 'of_copy': 0.818, 'different': {}, 'runs': '0.75-0.9'}]
    """
    found = []
    for rows in zip(*(run["rows"] for run in runs)):
        row = dict(rows[0])
        for name, value in row.items():
            if isinstance(value, (int, float)):
                row[name] = round(statistics.median(each[name] for each in rows), 3)
        row["different"] = {name: count for each in rows for name, count in each["different"].items()}
        parts = [each["of_copy"] for each in rows]
        found.append({**row, "runs": f"{min(parts)}-{max(parts)}"})
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report for a README."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"{report['device']}, {report['date']}, commit {report['commit']}; {versions}.", ""]
    if "verified" in report:
        verified = report["verified"]
        lines += [
            f"{report['modules']} modules, {verified['runs']} runs, {verified['wrong']} unlike the oracle.",
            "",
        ]
    if "bandwidth" in report:
        runs = report["bandwidth"]
        copies = ", ".join(str(run["copy_gb_per_s"]) for run in runs)
        lines += [
            f"A copy moves {copies} GB/s in {len(runs)} runs; medians, and `of_copy` from least to most.",
            "",
            "| work | dtype | tokens | us | GB/s | of the copy | runs | Triton / ours | torch / ours |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        columns = (
            "work",
            "dtype",
            "tokens",
            "us",
            "gb_per_s",
            "of_copy",
            "runs",
            "triton_over_ours",
            "torch_over_ours",
        )
        lines += ["| " + " | ".join(str(row[name]) for name in columns) + " |" for row in medians(runs)]
    return "\n".join(lines)


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    print(markdown(json.loads(file.read_text())))
