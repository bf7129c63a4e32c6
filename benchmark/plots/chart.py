"""Charts as SVG text: a row of panels over the same systems, with bars or with dots.

A chart has its own background and two sets of colours, of which the reader's browser chooses one by
`prefers-color-scheme`. Text stays text, and the same values give the same bytes. This module knows
nothing of what was measured; `benchmark.plots.__main__` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 880
MARGIN = 24
LABELS_END = 316  # where the rows' names end and the first panel begins
GAP = 44  # between panels
TOP = 112  # title, subtitle, names of the panels and of the bounds
ROW = 26
BAR = 14
FOOT = 46  # the scale below the rows
NOTE = 17
STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .page { fill: #ffffff; stroke: #d0d7de }
  .title { font-size: 17px; font-weight: 600 }
  .bold { font-weight: 600 }
  .soft { font-size: 12px; fill: #59636e }
  .named { font-size: 12px; fill: #bc4c00 }
  .bound { stroke: #bc4c00; stroke-dasharray: 4 3 }
  .grid { stroke: #e4e8ec }
  .ours { fill: #0969da }
  .theirs { fill: #a3acb5 }
  .round { fill: #ffffff; stroke: #1f2328 }
  .value { stroke: #ffffff; stroke-width: 4; paint-order: stroke }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .page { fill: #0d1117; stroke: #3d444d }
    .soft { fill: #9198a1 }
    .named { fill: #f0883e }
    .bound { stroke: #f0883e }
    .grid { stroke: #262c36 }
    .ours { fill: #4493f8 }
    .theirs { fill: #6e7681 }
    .round { fill: #0d1117; stroke: #f0f6fc }
    .value { stroke: #0d1117 }
  }
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One system. values: a number for each panel; rounds: what each of them is the median of."""

    label: str
    values: Sequence[float]
    rounds: Sequence[Sequence[float]] = ()
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn.

    unit: of the scale, which goes from 0 to `end` in steps of `step`.
    bounds: values that are drawn as lines through every panel, with their names.
    notes: lines of small text at the foot: what was measured, where, and from which file.
    """

    title: str
    subtitle: str
    panels: Sequence[str]
    rows: Sequence[Row]
    unit: str
    end: float
    step: float
    bounds: Sequence[tuple[float, str]] = ()
    notes: Sequence[str] = ()


def bar_chart(chart: Chart) -> str:
    """A bar from 0 to each value, and a circle for each round."""
    return _drawn(chart, _Panel.bar)


def dot_chart(chart: Chart) -> str:
    """A dot at each value."""
    return _drawn(chart, _Panel.dot)


def _drawn(chart: Chart, mark: Mark) -> str:
    bottom = TOP + ROW * len(chart.rows)
    height = bottom + FOOT + NOTE * len(chart.notes) + 8
    width = (WIDTH - MARGIN - LABELS_END - GAP * (len(chart.panels) - 1)) / len(chart.panels)
    parts = [
        _text(MARGIN, 36, chart.title, "title"),
        _text(MARGIN, 58, chart.subtitle, "soft"),
        *(
            _text(LABELS_END - 14, _middle(number) + 4, row.label, _weight(row), "end")
            for number, row in enumerate(chart.rows)
        ),
    ]
    for number, name in enumerate(chart.panels):
        panel = _Panel(chart, LABELS_END + number * (width + GAP), width, bottom)
        parts += [_text(panel.left, 88, name, "bold"), *panel.scale()]
        for index, row in enumerate(chart.rows):
            parts += mark(panel, row, number, _middle(index))
    parts += [
        _text(MARGIN, bottom + FOOT + NOTE * (number + 1) - 4, note, "soft")
        for number, note in enumerate(chart.notes)
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(_spoken(chart))}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        f"{body}\n</svg>\n"
    )


@dataclass(frozen=True, slots=True)
class _Panel:
    chart: Chart
    left: float
    width: float
    bottom: float

    def scale(self) -> Iterator[str]:
        """The grid with its numbers, the bounds with their names, and the unit."""
        for tick in range(int(self.chart.end / self.chart.step) + 1):
            value = tick * self.chart.step
            yield _line(self.x(value), TOP - 4, self.bottom, "grid")
            yield _text(self.x(value), self.bottom + 16, f"{value:g}", "soft", "middle")
        yield _text(self.left + self.width / 2, self.bottom + 33, self.chart.unit, "soft", "middle")
        for value, name in self.chart.bounds:
            at_right = self.x(value) > self.left + self.width / 2
            yield _line(self.x(value), TOP - 4, self.bottom, "bound")
            yield _text(self.x(value), TOP - 9, name, "named", "end" if at_right else "start")

    def bar(self, row: Row, number: int, y: float) -> Iterator[str]:
        """The mark of panel `number` for a row whose middle is at `y`."""
        value, rounds = row.values[number], row.rounds[number] if row.rounds else ()
        yield (
            f'<rect class="{_colour(row)}" x="{self.left:.1f}" y="{y - BAR / 2:.1f}" '
            f'width="{self.x(value) - self.left:.1f}" height="{BAR}" rx="2"/>'
        )
        for one in rounds if len(rounds) > 1 else ():
            yield f'<circle class="round" cx="{self.x(one):.1f}" cy="{y:.1f}" r="2.5"/>'
        yield self._number(row, value, max([value, *rounds]), y)

    def dot(self, row: Row, number: int, y: float) -> Iterator[str]:
        """As `bar`."""
        value = row.values[number]
        yield f'<circle class="{_colour(row)}" cx="{self.x(value):.1f}" cy="{y:.1f}" r="6"/>'
        yield self._number(row, value, value, y)

    def _number(self, row: Row, value: float, beside: float, y: float) -> str:
        return _text(self.x(beside) + 10, y + 4, f"{value:.2f}", f"value {_weight(row)}".strip())

    def x(self, value: float) -> float:
        return self.left + self.width * value / self.chart.end


Mark = Callable[[_Panel, Row, int, float], Iterator[str]]


def _spoken(chart: Chart) -> str:
    """The whole chart in words, for those who do not see it."""
    values = "; ".join(
        f"{row.label}: {', '.join(f'{value:.2f}' for value in row.values)}" for row in chart.rows
    )
    bounds = "".join(f"; {name}" for _, name in chart.bounds)
    return f"{chart.title}. {', '.join(chart.panels)}, {chart.unit}: {values}{bounds}"


def _middle(number: int) -> float:
    return TOP + ROW * number + ROW / 2


def _colour(row: Row) -> str:
    return "ours" if row.is_ours else "theirs"


def _weight(row: Row) -> str:
    return "bold" if row.is_ours else ""


def _text(x: float, y: float, content: str, kind: str, anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{placed}>{escape(content)}</text>'


def _line(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
