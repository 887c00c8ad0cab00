"""How much memory a cache takes in each format, and how many blocks fit."""

from __future__ import annotations

import argparse
from typing import Any

from ..formats import PLAIN, QUANTIZED
from . import arguments, output

FORMATS = {**PLAIN, **QUANTIZED}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, default, meaning in (
        ("--num-layers", 32, "layers of the model"),
        ("--num-kv-heads", 8, "heads of keys and values of a layer"),
        ("--head-size", 128, "elements of a head"),
        ("--block-size", 16, "slots of a block"),
    ):
        text = f"{meaning}, by default %(default)s"
        parser.add_argument(option, type=arguments.positive_int, default=default, metavar="N", help=text)
    text = "for all caches, with its unit, by default %(default)s"
    parser.add_argument("--memory", type=arguments.size, default="8GiB", metavar="SIZE", help=text)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print a line for each format."""
    found = plan(
        options.num_layers, options.num_kv_heads, options.head_size, options.block_size, options.memory
    )
    if options.json:
        output.print_json(found)
        return 0
    print(
        f"{options.num_layers} layers, {options.num_kv_heads} heads of {options.head_size}, keys and values, "
        f"blocks of {options.block_size}, in {options.memory:,} bytes ({options.memory / 2**30:.2f} GiB)"
    )
    header = ["format", "bytes a token", "blocks", "tokens", "times smaller than float32", "than float16"]
    output.print_table(header, [_cells(row, found) for row in found])
    return 0


def plan(
    num_layers: int, num_kv_heads: int, head_size: int, block_size: int, memory: int
) -> list[dict[str, Any]]:
    """For each format the bytes of one token, and the blocks and tokens that fit into `memory` bytes."""
    found = []
    for name in FORMATS:
        size = bytes_a_token(name, num_layers, num_kv_heads, head_size)
        blocks = memory // (size * block_size)
        found.append(
            {
                "format": name,
                "bytes_per_token": size,
                "num_blocks": blocks,
                "num_tokens": blocks * block_size,
            }
        )
    return found


def _cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """A row of the table; float32 and float16 are the first two formats."""
    ratios = [other["bytes_per_token"] / row["bytes_per_token"] for other in rows[:2]]
    numbers = [row["bytes_per_token"], row["num_blocks"], row["num_tokens"]]
    return [row["format"], *(f"{number:,}" for number in numbers), *(f"{ratio:.2f}" for ratio in ratios)]


def bytes_a_token(name: str, num_layers: int, num_kv_heads: int, head_size: int) -> int:
    """Bytes of one token's keys, values and scales in all layers.

    >>> bytes_a_token("int8_per_token_head", num_layers=1, num_kv_heads=8, head_size=128)
    2112
    """
    return 2 * num_layers * num_kv_heads * FORMATS[name].row_bytes(head_size)
