"""Says at the end of a run which gates ran, and why the others did not."""

from __future__ import annotations

GATES = {
    "test_modules.py": "module gate (reads every packaged module)",
    "test_native.py": "native gate (Intel's offline compiler)",
    "test_driver.py": "driver gate (Intel's Level Zero driver, simulated GPUs)",
    "test_races.py": "race and bounds gate (Oclgrind)",
    "test_recorded.py": "real GPU gate (what was recorded on an NVIDIA GPU)",
}


def pytest_terminal_summary(terminalreporter):
    counts = {file: {"passed": 0, "failed": 0, "error": 0, "skipped": 0} for file in GATES}
    reasons = {file: set() for file in GATES}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            file = report.nodeid.split("::")[0].rsplit("/", 1)[-1]
            if file in GATES and "gates/" in report.nodeid:
                counts[file][outcome] += 1
                if outcome == "skipped":
                    reasons[file].add(report.longrepr[2].removeprefix("Skipped: "))
    if not any(sum(count.values()) for count in counts.values()):
        return
    terminalreporter.section("gates")
    for file, title in GATES.items():
        count = {outcome: number for outcome, number in counts[file].items() if number}
        told = ", ".join(f"{number} {outcome}" for outcome, number in count.items()) or "not collected"
        state = "RAN" if set(count) - {"skipped"} else "DID NOT RUN"
        terminalreporter.write_line(f"{state:11} {title}: {told}")
        for reason in sorted(reasons[file]):
            terminalreporter.write_line(f"{'':11}   skipped: {reason}")
