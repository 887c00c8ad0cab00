"""Goals that the project has set itself, and whether a run reaches them."""

from __future__ import annotations

from typing import NamedTuple

from .contenders import COMPILED, EAGER, FLOOR, OURS, OURS_TORCH
from .presets import Case
from .report import Result


class Bar(NamedTuple):
    """`ours` must be `factor` times as fast as the fastest of the rivals whose names start with `rival`."""

    operation: str
    tokens: int
    ours: str
    rival: str
    factor: float
    dtype: str = "float32"


BARS = [
    Bar("write", 8, OURS, EAGER, 1.6),
    Bar("write", 8, OURS, "numba-dpex call_kernel", 15),
    Bar("write", 8, OURS, "dpnp", 20),
    Bar("write", 8, OURS_TORCH, EAGER, 1.5),
    Bar("write", 8, OURS_TORCH, "torch index_copy_", 1),
    Bar("write", 4096, OURS, "copy", 0.9),
    Bar("write", 4096, OURS, EAGER, 1.8),
    *(Bar("int8", tokens, OURS, EAGER, factor) for tokens, factor in ((8, 4), (512, 4), (4096, 8))),
    *(Bar("int8", tokens, OURS, COMPILED, 1) for tokens in (8, 512, 4096)),
    *(Bar("int8", tokens, OURS, COMPILED, 1, "bfloat16") for tokens in (512, 4096)),
    Bar("int8", 4096, OURS, EAGER, 6, "bfloat16"),
    Bar("dequantize", 65536, OURS, EAGER, 3),
    Bar("dequantize", 65536, OURS, "copy", 0.75),
]
HOST_TIME = 12.0  # microseconds of a write of 8 tokens beyond the launch of an empty kernel


class Verdict(NamedTuple):
    """A bar, what was found, and whether that is enough."""

    what: str
    wanted: str
    found: str
    reached: bool


def verdicts(results: list[Result]) -> list[Verdict]:
    """One for each bar that the results speak of."""
    found = []
    for bar in BARS:
        result = _of(results, bar)
        ours = result and result.timings.get(bar.ours)
        rivals = (
            [t.median for name, t in result.timings.items() if name.startswith(bar.rival)] if result else []
        )
        if ours and rivals:
            ratio = min(rivals) / ours.median
            what = f"{result.case}: {bar.ours} against {bar.rival}"
            found.append(Verdict(what, f">= {bar.factor:g}x", f"{ratio:.2f}x", ratio >= bar.factor))
    result = _of(results, BARS[0])
    if result and {OURS, FLOOR} <= result.timings.keys():
        beyond = result.timings[OURS].median - result.timings[FLOOR].median
        what = f"{result.case}: host time beyond an empty launch"
        found.append(Verdict(what, f"<= {HOST_TIME:g} us", f"{beyond:.1f} us", beyond <= HOST_TIME))
    return found


def _of(results: list[Result], bar: Bar) -> Result | None:
    return next((r for r in results if r.case == Case(bar.operation, bar.tokens, dtype=bar.dtype)), None)
