"""What commands print: plain lines of ASCII, alike on a terminal, in a file and in a pipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns. No cell is truncated, whatever the width of the terminal.

    >>> print_table(["device", "memory"], [["opencl:cpu:0", "31.0 GiB"], ["cuda:gpu:0", "8.0 GiB"]])
    device        memory
    opencl:cpu:0  31.0 GiB
    cuda:gpu:0    8.0 GiB
    """
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def print_json(content: Any) -> None:
    """One JSON document."""
    print(json.dumps(content, indent=1))
