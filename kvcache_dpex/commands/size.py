"""How much memory a cache takes in each format, and how many blocks fit."""

from __future__ import annotations

import argparse
import re

from ..formats import PLAIN, QUANTIZED

FORMATS = {**PLAIN, **QUANTIZED}
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-layers", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--memory", type=parse_size, default=parse_size("8GiB"), help="such as 8GiB")


def run(options: argparse.Namespace) -> int:
    """Print a table of the formats."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "format",
        "bytes a token",
        "blocks",
        "tokens",
        "times smaller than float32",
        "than float16",
        title=f"{options.num_layers} layers, {options.num_kv_heads} heads of {options.head_size}, keys and "
        f"values, blocks of {options.block_size}, in {options.memory / 2**30:.2f} GiB",
    )
    for name in FORMATS:
        size = bytes_a_token(name, options.num_layers, options.num_kv_heads, options.head_size)
        blocks = options.memory // (size * options.block_size)
        row_of = {
            other: bytes_a_token(other, options.num_layers, options.num_kv_heads, options.head_size)
            for other in ("float32", "float16")
        }
        table.add_row(
            name,
            f"{size:,}",
            f"{blocks:,}",
            f"{blocks * options.block_size:,}",
            *(f"{other / size:.2f}" for other in row_of.values()),
        )
    Console().print(table)
    return 0


def bytes_a_token(name: str, num_layers: int, num_kv_heads: int, head_size: int) -> int:
    """Bytes of one token's keys, values and scales in all layers.

    >>> bytes_a_token("int8_per_token_head", num_layers=1, num_kv_heads=8, head_size=128)
    2112
    """
    return 2 * num_layers * num_kv_heads * FORMATS[name].row_bytes(head_size)


def parse_size(text: str) -> int:
    """Bytes of a size such as 8GiB, 500MB or 1024.

    >>> parse_size("8GiB")
    8589934592
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"a size must look like 8GiB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
