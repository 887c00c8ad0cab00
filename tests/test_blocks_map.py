"""A pool's repr, its map in a terminal and its map in Jupyter."""

import io
import re

import pytest
from rich.console import Console

from kvcache_dpex.blocks import BlockPool


@pytest.fixture
def pool():
    """Blocks: two shared by "a" and "b", one of each that is partly filled, one cached, three unused."""
    pool = BlockPool(8, 4)
    pool.allocate("a", list(range(9)))
    pool.commit("a")
    pool.allocate("b", [*range(8), 7, 7])
    pool.allocate("c", [5, 5, 5, 5])
    pool.commit("c")
    pool.free("c")
    return pool


def shown(pool):
    console = Console(width=80, file=io.StringIO())
    console.print(pool)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_repr(pool):
    expected = "<BlockPool: 4 of 8 blocks used by 2 sequences, 1 cached, 3 unused, block_size 4>"
    assert repr(pool) == expected


def test_the_map_in_a_terminal(pool):
    """Each tile tells its sequence, how full it is, and how many hold it if several do."""
    assert shown(pool) == [
        "BlockPool",
        "8 blocks of 4: 4 used (50%), 1 cached, 3 unused",
        "prefix blocks: 2 hits, 2 misses, 0 evictions",
        "",
        "0  A█2A█2A▂ B▄ ░░ ·  ·  ·",
        "",
        "A  'a': 9 tokens in 3 blocks",
        "B  'b': 10 tokens in 3 blocks",
        "░░ cached   · unused   A█2 held by 2 sequences",
    ]


def test_the_map_in_jupyter(pool):
    html = pool._repr_html_()
    tiles = re.findall(r'<i([^>]*) title="([^"]*)">(.*?)</i>', html)
    assert [(title, text) for _, title, text in tiles] == [
        ("block 0: &#x27;a&#x27; and 1 more, 4 of 4 slots", "A<sup>2</sup>"),
        ("block 1: &#x27;a&#x27; and 1 more, 4 of 4 slots", "A<sup>2</sup>"),
        ("block 2: &#x27;a&#x27;, 1 of 4 slots", "A"),
        ("block 3: &#x27;b&#x27;, 2 of 4 slots", "B"),
        ("block 4: cached", ""),
        ("block 5: unused", ""),
        ("block 6: unused", ""),
        ("block 7: unused", ""),
    ]
    assert "25%" in tiles[2][0]
    assert "50%" in tiles[3][0]


def test_names_are_escaped_and_cut():
    pool = BlockPool(2, 4)
    pool.allocate("<script>alert(1)</script>" * 9, 1)
    html = pool._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/scr" in html
    assert len(html) < 5000


@pytest.mark.parametrize("lengths", [(7, 5), (5, 7)])
def test_a_shared_block_is_as_full_as_its_longest_holder_says(lengths):
    pool = BlockPool(4, 4)
    pool.allocate("a", 7)
    pool.fork("a", "b")
    for name, length in zip("ab", lengths):
        pool.truncate(name, length)
    assert "block 1: &#x27;a&#x27; and 1 more, 3 of 4 slots" in pool._repr_html_()
    assert shown(pool)[4].startswith("0  A█2A▆2")


def test_released_blocks_are_told_in_the_legend():
    pool = BlockPool(4, 4, sliding_window=4)
    pool.allocate("a", 12)
    pool.commit("a")
    assert "A  'a': 12 tokens in 1 block, 2 released" in shown(pool)


def test_a_large_pool_has_a_bounded_map():
    """A tile then stands for several blocks, and is as full as they are."""
    pool = BlockPool(100_000, 16)
    for name in range(100):
        pool.allocate(name, 16 * 500)
    pool.free(1)
    html, lines = pool._repr_html_(), shown(pool)
    assert html.count(' title="') == 479  # tiles of 209 blocks
    assert len(html) < 80_000
    assert len(lines) < 50
    assert "87 more" in lines
    assert "a tile is 209 blocks" in lines[-1]
    # The second sequence held blocks 500 to 999.
    assert "blocks 418 to 626: 82 used, 0 cached, 127 unused" in html
    assert lines[4].startswith("    0  A█ A█ A▄ ·  B▂ B█ B█ C█")


def test_an_empty_pool_has_a_map():
    pool = BlockPool(0, 16)
    assert shown(pool)[1] == "0 blocks of 16: 0 used (0%), 0 cached, 0 unused"
    assert "0 blocks of 16" in pool._repr_html_()
