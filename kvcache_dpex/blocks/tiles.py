"""A pool as a bounded number of tiles, which `text_map` and `html_map` draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .readings import PoolReadings

MOST_TILES = 480
LEGEND_SEQUENCES = 12
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")  # Okabe and Ito
INKS = ("#000", "#000", "#FFF", "#000", "#FFF", "#FFF", "#000")


class Tile(NamedTuple):
    """One block, or several neighbours where a pool has more blocks than a map has tiles."""

    owner: int | None  # the sequence, by its place in the pool, that holds most of it
    filled: float  # share of its slots that hold a token of a sequence
    holders: int  # how many sequences hold a block of it, at most
    cached: bool  # not in use, and at least one block is cached
    text: str


class LegendEntry(NamedTuple):
    owner: int
    name: str
    text: str


def tiles_of(pool: PoolReadings) -> tuple[int, list[Tile]]:
    """Blocks in a tile, and at most `MOST_TILES` tiles."""
    step = max(1, -(-pool.num_blocks // MOST_TILES))
    owners = [-1] * pool.num_blocks
    filled = [0] * pool.num_blocks
    for place, state in enumerate(pool._states.values()):
        for index, block in enumerate(state.held, state.released):
            owners[block] = place if owners[block] < 0 else owners[block]
            filled[block] = max(filled[block], min(pool.block_size, state.length - index * pool.block_size))
    names = pool.sequences
    return step, [
        _tile(pool, range(start, min(pool.num_blocks, start + step)), owners, filled, names)
        for start in range(0, pool.num_blocks, step)
    ]


def _tile(
    pool: PoolReadings, blocks: range, owners: list[int], filled: list[int], names: tuple[Hashable, ...]
) -> Tile:
    references, cached = pool._blocks.references, pool._blocks.cached
    held = Counter(owners[block] for block in blocks if owners[block] >= 0)
    owner = held.most_common(1)[0][0] if held else None
    slots = sum(filled[block] for block in blocks)
    holders = max(references[block] for block in blocks)
    num_cached = sum(block in cached for block in blocks)
    if len(blocks) == 1:
        text = f"block {blocks[0]}: " + ("cached" if num_cached else "unused")
        if owner is not None:
            others = f" and {holders - 1} more" if holders > 1 else ""
            text = f"block {blocks[0]}: {short(names[owner])}{others}, {slots} of {pool.block_size} slots"
    else:
        used = sum(held.values())
        text = (
            f"blocks {blocks[0]} to {blocks[-1]}: {used} used, {num_cached} cached, "
            f"{len(blocks) - used - num_cached} unused"
        )
    return Tile(
        owner, slots / (len(blocks) * pool.block_size), holders, owner is None and num_cached > 0, text
    )


def legend_of(pool: PoolReadings) -> tuple[list[LegendEntry], int]:
    """The first sequences, and how many there are besides."""
    entries = []
    for place, (name, state) in enumerate(pool._states.items()):
        if place == LEGEND_SEQUENCES:
            break
        released = f", {state.released} released" if state.released else ""
        text = f"{plural(state.length, 'token')} in {plural(len(state.held), 'block')}{released}"
        entries.append(LegendEntry(place, short(name), text))
    return entries, len(pool._states) - len(entries)


def summary_of(pool: PoolReadings) -> tuple[str, str]:
    """Blocks by state, and what the prefix cache did."""
    stats = pool.stats()
    return (
        f"{plural(stats.num_blocks, 'block')} of {pool.block_size}: {stats.used} used "
        f"({stats.utilisation:.0%}), {stats.cached} cached, {stats.unused} unused",
        f"prefix blocks: {plural(stats.hits, 'hit')}, {plural(stats.misses, 'miss')}, "
        f"{plural(stats.evictions, 'eviction')}",
    )


def plural(number: int, noun: str) -> str:
    """
    >>> plural(1, "block"), plural(2, "miss")
    ('1 block', '2 misses')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def in_units(size: int) -> str:
    """
    >>> in_units(640), in_units(3 * 2**20)
    ('640 bytes', '3.0 MiB')
    """
    power = min(3, max(0, size.bit_length() - 1) // 10)
    return f"{size / 1024**power:.1f} {'KMG'[power - 1]}iB" if power else f"{size} bytes"


def letter(owner: int) -> str:
    """What a tile shows of its sequence besides the colour."""
    return chr(ord("A") + owner % 26)


def short(name: Hashable) -> str:
    text = repr(name)
    return text if len(text) <= 24 else f"{text[:23]}\N{HORIZONTAL ELLIPSIS}"
