"""Types of command line arguments, each with an error that says what it must be."""

from __future__ import annotations

import argparse
import re

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def positive_int(text: str) -> int:
    """An integer >= 1.

    >>> positive_int("16")
    16
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return number


def size(text: str) -> int:
    """Bytes of a size with its unit, such as 8GiB or 500MB.

    >>> size("8GiB")
    8589934592
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", text.lower(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a number with a unit, such as 8GiB or 500MB, got {text!r}")
    number = int(float(match[1]) * _UNITS[match[2]])
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least one byte, got {text!r}")
    return number


def repository(text: str) -> str:
    """A name on the kernels hub, ``owner/name``.

    >>> repository("your-name/kvcache-dpex")
    'your-name/kvcache-dpex'
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"must be owner/name, got {text!r}")
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that every command with a table has."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")
