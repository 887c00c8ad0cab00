"""What a report says, as a table: ``python -m benchmarks.nvidia.table [FILE]``."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from kvcache_dpex.runtime import store

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
    """Rows that do not show what they must."""
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
        lines += [
            f"A copy moves {report['bandwidth']['copy_gb_per_s']} GB/s.",
            "",
            "| work | dtype | tokens | us | GB/s | of the copy | Triton / ours | torch / ours |",
            "|---|---|---|---|---|---|---|---|",
        ]
        columns = (
            "work",
            "dtype",
            "tokens",
            "us",
            "gb_per_s",
            "of_copy",
            "triton_over_ours",
            "torch_over_ours",
        )
        for row in report["bandwidth"]["rows"]:
            lines.append("| " + " | ".join(str(row[column]) for column in columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    print(markdown(json.loads(file.read_text())))
