"""Real GPU gate: what was recorded on an NVIDIA GPU holds, and is about the kernels of today.

The run itself needs the GPU: benchmarks/nvidia/README.md.
"""

import json

import pytest

from benchmarks.nvidia import table


@pytest.fixture(scope="module")
def report():
    if not table.RESULTS.exists():
        pytest.skip("nothing recorded yet: benchmarks/nvidia/README.md says how")
    recorded = json.loads(table.RESULTS.read_text())
    if recorded["digest"] != table.digest_of_modules():
        pytest.skip(f"recorded for other kernels, of commit {recorded['commit']}: run it again")
    return recorded


def test_every_module_gave_the_oracles_bits(report):
    verified = report["verified"]
    assert verified["runs"] > 0
    assert (verified["wrong"], verified["never_launched"]) == (0, [])


def test_compute_sanitizer_found_nothing_but_what_was_planted(report):
    errors = dict(report["sanitizer_errors"])
    planted = [errors.pop(name) for name in list(errors) if "planted" in name]
    assert set(errors.values()) == {0}
    assert len(planted) == 2
    assert min(planted) > 0


def test_every_bar_is_reached(report):
    """Medians of the recorded runs."""
    assert table.below_the_bars(table.medians(report["bandwidth"])) == []
