"""Small plots without a plotting library: columns for the terminal, lines for an SVG file.

Where it sits: used by `demo`; knows numbers and labels, nothing of streams.
Invariant I-PLT-1: what is drawn is what was given: a column per value, at most `COLUMNS_MAX` of them, in
the terminal the largest of each group when there are more values than columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS_MAX: Final = 64
ROWS: Final = 6
BLOCKS: Final = " ▁▂▃▄▅▆▇█"
WIDTH: Final = 720
PANEL: Final = 180
MARGIN: Final = 56


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time, with the words that stand beside them."""

    title: str
    unit: str
    points: tuple[tuple[float, float], ...]
    """Seconds since the start, value."""


def short(value: float) -> str:
    """`12345` -> `12.3k`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def columns(series: Series) -> str:
    """The series as text: a title, `ROWS` lines of blocks, the axis."""
    values = _grouped([value for _, value in series.points])
    top = max(values, default=0.0) or 1.0
    lines = [f"{series.title} ({series.unit}), highest {short(max(values, default=0.0))}"]
    for row in range(ROWS - 1, -1, -1):
        filled = [value / top * ROWS - row for value in values]
        text = "".join(BLOCKS[max(0, min(8, round(part * 8)))] * 2 for part in filled)
        label = short(top) if row == ROWS - 1 else "0" if row == 0 else ""
        lines.append(f"{label:>7} ┤{text.rstrip()}")
    seconds = series.points[-1][0] if series.points else 0.0
    lines.append(f"{'':>7} └{'─' * max(2 * len(values), 8)} {seconds:.0f} s")
    return "\n".join(lines)


def _grouped(values: Sequence[float]) -> list[float]:
    if len(values) <= COLUMNS_MAX // 2:
        return list(values)
    step = -(-len(values) // (COLUMNS_MAX // 2))
    return [max(values[first : first + step]) for first in range(0, len(values), step)]


def svg(title: str, panels: Sequence[Series]) -> str:
    """One panel below the other over the same seconds."""
    height = 48 + len(panels) * (PANEL + 44)
    last = max((series.points[-1][0] for series in panels if series.points), default=1.0) or 1.0
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="26" font-size="16" fill="#1c1e21">{escape(title)}</text>',
    ]
    for number, series in enumerate(panels):
        parts += _panel(
            series, 64 + number * (PANEL + 44), last, ("#1f6f8b", "#b5542c")[number % 2]
        )
    return "\n".join([*parts, "</svg>", ""])


def _panel(series: Series, top: int, last: float, colour: str) -> list[str]:
    highest = max((value for _, value in series.points), default=0.0) or 1.0
    bottom, right = top + PANEL, WIDTH - 24

    def place(point: tuple[float, float]) -> str:
        x = MARGIN + point[0] / last * (right - MARGIN)
        y = bottom - point[1] / highest * (PANEL - 16)
        return f"{x:.1f},{y:.1f}"

    places = [place(point) for point in series.points]
    dots = []
    for spot in places:
        x, _, y = spot.partition(",")
        dots.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
    return [
        (
            f'<text x="{MARGIN}" y="{top}" fill="#1c1e21">'
            f"{escape(series.title)} ({escape(series.unit)})</text>"
        ),
        f'<path d="M{MARGIN} {top + 8}V{bottom}H{right}" fill="none" stroke="#9aa0a6"/>',
        (
            f'<text x="{MARGIN - 6}" y="{top + 20}" text-anchor="end" fill="#5f6368">'
            f"{short(highest)}</text>"
        ),
        f'<text x="{MARGIN - 6}" y="{bottom}" text-anchor="end" fill="#5f6368">0</text>',
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end" fill="#5f6368">{last:.0f} s</text>',
        f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *dots,
    ]
