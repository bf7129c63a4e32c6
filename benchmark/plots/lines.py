"""Panels of lines as SVG text, in the style of the other charts: computed lines, simulated dots.

Knows nothing of what is drawn; `benchmark.plots.__main__` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from benchmark.plots.chart import MARGIN, NOTE, STYLE, WIDTH

LEFT, GAP = 62, 56
TOP, PANEL, FOOT = 96, 190, 52  # of a row of panels: above its grid, the grid, below it
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#59636e")
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """points: computed, joined by a line. dots: simulated, at the same places or fewer."""

    label: str
    points: Sequence[Point]
    dots: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: Sequence[Line]


def line_chart(
    title: str,
    subtitle: str,
    panels: Sequence[Panel],
    unit: str,
    ends: Point,
    step: float,
    notes: Sequence[str],
) -> str:
    """Two panels in a row. ends: of both scales, which begin at 0; a line marks 1 on the upright
    one."""
    n_rows = -(-len(panels) // 2)
    each = TOP + PANEL + FOOT - 40
    height = 70 + each * n_rows + NOTE * len(notes) + 34
    parts = [_text(MARGIN, 36, title, "title"), _text(MARGIN, 58, subtitle, "soft")]
    for number, panel in enumerate(panels):
        left = LEFT + (number % 2) * ((WIDTH - LEFT - MARGIN - GAP) / 2 + GAP)
        top = 100 + each * (number // 2)
        parts += _panel(panel, left, top, unit, ends, step)
    labels = [line.label for line in panels[0].lines]
    y = 70 + each * n_rows + 10
    for number, label in enumerate(labels):
        x = MARGIN + 165 * number
        parts.append(
            f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{COLOURS[number]}" '
            'stroke-width="2"/>'
        )
        parts.append(_text(x + 28, y, label, "soft"))
    parts += [
        _text(MARGIN, y + NOTE * (number + 1) + 2, note, "soft")
        for number, note in enumerate(notes)
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        f"{body}\n</svg>\n"
    )


def _panel(
    panel: Panel, left: float, top: float, unit: str, ends: Point, step: float
) -> Iterator[str]:
    width = (WIDTH - LEFT - MARGIN - GAP) / 2
    end_x, end_y = ends

    def place(point: Point) -> Point:
        return left + width * point[0] / end_x, top + PANEL * (1 - point[1] / end_y)

    yield _text(left, top - 12, panel.title, "bold")
    n = 0
    while (value := n * step) <= end_y + 1e-9:
        _, y = place((0, value))
        kind = "bound" if abs(value - 1) < 1e-9 else "grid"
        yield (
            f'<line class="{kind}" x1="{left:.1f}" x2="{left + width:.1f}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        yield _text(left - 8, y + 4, f"{value:.2g}", "soft", "end")
        n += 1
    for gpus in sorted({x for line in panel.lines for x, _ in line.points}):
        yield _text(place((gpus, 0))[0], top + PANEL + 18, f"{gpus:g}", "soft", "middle")
    yield _text(left + width, top + PANEL + 34, unit, "soft", "end")
    for colour, line in zip(COLOURS, panel.lines, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, line.points))
        yield f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>'
        for x, y in map(place, line.dots):
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
