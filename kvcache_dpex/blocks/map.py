"""Maps of a pool for terminals and for Jupyter."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from .tiles import COLOURS, INKS, Tile, legend_of, letter, summary_of, tiles_of

if TYPE_CHECKING:
    from rich.text import Text

    from .readings import PoolReadings

TEXT_COLUMNS, HTML_COLUMNS = 24, 32
LEVELS = "▁▂▃▄▅▆▇█"
STYLE = """
.kvdpex-pool {font: 13px/1.5 system-ui, sans-serif; color: inherit}
.kvdpex-pool .map {display: grid; grid-template-columns: max-content repeat(%d, 22px); gap: 2px;
  margin: 6px 0}
.kvdpex-pool .map b {font-weight: normal; opacity: .6; text-align: right; padding-right: 6px;
  line-height: 22px}
.kvdpex-pool i {display: inline-block; box-sizing: border-box; width: 22px; height: 22px; overflow: hidden;
  font: 11px/20px ui-monospace, monospace; text-align: center; border: 1px solid rgba(128,128,128,.55);
  border-radius: 3px}
.kvdpex-pool i sup {font-size: 8px; line-height: 0; font-weight: bold}
.kvdpex-pool i.shared {border: 2px solid currentColor; line-height: 18px}
.kvdpex-pool i.cached {background: repeating-linear-gradient(45deg, rgba(128,128,128,.5) 0 2px,
  transparent 2px 5px)}
.kvdpex-pool .legend {display: flex; flex-wrap: wrap; gap: 2px 18px}
.kvdpex-pool .legend i {vertical-align: middle; margin-right: 5px}
"""


def text_map(pool: PoolReadings, title: str = "BlockPool", lines: Sequence[str] = ()) -> Text:
    """The map that ``rich.print(pool)`` shows: letter, fill and number of holders of each tile.

    `lines` follow what the pool says of itself.
    """
    from rich.text import Text

    step, tiles = tiles_of(pool)
    text = Text("\n".join((title, *summary_of(pool), *lines, "")))
    width = len(str(max(0, len(tiles) - 1) * step))
    for place, tile in enumerate(tiles):
        if place % TEXT_COLUMNS == 0:
            text.append(f"\n{place * step:>{width}}  ", style="dim")
        text.append(*_text_tile(tile))
    text.append("\n\n")
    entries, others = legend_of(pool)
    for entry in entries:
        text.append(letter(entry.owner), style=_text_style(entry.owner))
        text.append(f"  {entry.name}: {entry.text}\n")
    text.append(f"{others} more\n" if others else "")
    text.append("░░ cached   · unused   A█2 held by 2 sequences")
    text.append(f"   a tile is {step} blocks" if step > 1 else "")
    return text


def _text_tile(tile: Tile) -> tuple[str, str]:
    if tile.owner is None:
        return ("░░ ", "dim") if tile.cached else ("·  ", "dim")
    level = LEVELS[min(len(LEVELS) - 1, int(tile.filled * len(LEVELS) - 0.01))]
    holders = " " if tile.holders == 1 else str(tile.holders) if tile.holders < 10 else "+"
    return f"{letter(tile.owner)}{level}{holders}", _text_style(tile.owner)


def _text_style(owner: int) -> str:
    return f"bold {COLOURS[owner % len(COLOURS)]}"


def html_map(pool: PoolReadings, title: str = "BlockPool", lines: Sequence[str] = ()) -> str:
    """The map that Jupyter shows: tiles filled from below, with details where the pointer rests."""
    step, tiles = tiles_of(pool)
    cells = []
    for place, tile in enumerate(tiles):
        if place % HTML_COLUMNS == 0:
            cells.append(f"<b>{place * step}</b>")
        cells.append(_html_tile(tile))
    entries, others = legend_of(pool)
    legend = [f"{_swatch(entry.owner)}{escape(entry.name)}: {entry.text}" for entry in entries]
    legend += [f"{others} more"] if others else []
    legend += ['<i class="cached"></i>cached', "<i></i>unused"]
    legend += ['<i class="shared">A<sup>2</sup></i>held by 2 sequences']
    legend += [f"a tile is {step} blocks"] if step > 1 else []
    return (
        f'<div class="kvdpex-pool"><style>{STYLE % HTML_COLUMNS}</style>'
        f"<div><strong>{title}</strong> {'; '.join(summary_of(pool))}</div>"
        f"{''.join(f'<div>{escape(line)}</div>' for line in lines)}"
        f'<div class="map">{"".join(cells)}</div>'
        f'<div class="legend">{"".join(f"<span>{each}</span>" for each in legend)}</div></div>'
    )


def _html_tile(tile: Tile) -> str:
    title = escape(tile.text)
    if tile.owner is None:
        return f'<i class="{"cached" if tile.cached else "unused"}" title="{title}"></i>'
    shared = f"<sup>{tile.holders}</sup>" if tile.holders > 1 else ""
    kind = ' class="shared"' if shared else ""
    return (
        f'<i{kind} style="{_fill(tile.owner, tile.filled)}" title="{title}">{letter(tile.owner)}{shared}</i>'
    )


def _swatch(owner: int) -> str:
    return f'<i style="{_fill(owner, 1)}">{letter(owner)}</i>'


def _fill(owner: int, filled: float) -> str:
    """A tile in its sequence's colour, paler above what is filled."""
    colour = COLOURS[owner % len(COLOURS)]
    ink = INKS[owner % len(INKS)] if filled >= 0.5 else "inherit"
    return f"color:{ink};background:linear-gradient(to top,{colour} {filled:.0%},{colour}33 {filled:.0%})"
