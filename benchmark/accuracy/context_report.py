"""From cells of texts to the table: word error rates by slack, beside the full context's.

Intervals are at 95 %, by bootstrap over recordings; differences are taken recording by recording.
Speeds are medians over the parts of a set, and ratios of speeds are taken part by part: a part in
which the machine did something else for a while decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmark.accuracy.context_cells import FULL_SLACK, Cell
from benchmark.shared.word_errors import WordErrors, count_all, difference, interval, total

Points = tuple[float, float, float]  # of word error rate above another, and the interval of that


@dataclass(frozen=True, slots=True)
class Row:
    """One slack over a whole set.

    first, second: errors by recording after each look. speeds: files/s of each part, with one look
    and with the second one as well.
    """

    slack: int
    first: list[WordErrors]
    second: list[WordErrors]
    windows: int
    doubted: int
    positions: int
    speeds: list[tuple[float, float]]

    @classmethod
    def of(cls, cells: Sequence[Cell], said: Sequence[str], language: str | None) -> Row:
        """cells: of one slack, all parts in order; said: the references of all recordings."""
        first = [text for cell in cells for text in cell.first]
        second = [text for cell in cells for text in cell.second]
        return cls(
            cells[0].key.slack,
            count_all(said, first, language),
            count_all(said, second, language),
            sum(cell.windows for cell in cells),
            sum(cell.doubted for cell in cells),
            sum(cell.positions for cell in cells),
            [
                (len(cell.first) / cell.first_s, len(cell.first) / (cell.first_s + cell.second_s))
                for cell in cells
            ],
        )

    @property
    def name(self) -> str:
        return "full" if self.slack == FULL_SLACK else str(self.slack)

    @property
    def files_per_s(self) -> tuple[float, float]:
        """With one look, and with the second one as well; medians over the parts."""
        return median(one for one, _ in self.speeds), median(both for _, both in self.speeds)

    def times(self, full: Row) -> tuple[float, float]:
        """`files_per_s` over that of the full context; medians over the parts."""
        bases = [base for base, _ in full.speeds]
        pairs = list(zip(self.speeds, bases, strict=True))
        return (
            median(one / base for (one, _), base in pairs),
            median(both / base for (_, both), base in pairs),
        )


def as_json(row: Row, full: Row) -> dict[str, Any]:
    """A row's figures; `points` are those above the same checkpoint's full context."""
    return {
        "slack": row.name,
        "windows": row.windows,
        "positions": round(row.positions / row.windows, 1),
        "first_look": _errors(row.first, full.first),
        "encoded_twice": round(row.doubted / row.windows, 5),
        "second_look": _errors(row.second, full.first),
        "files_per_s": [round(speed, 3) for speed in row.files_per_s],
        "times_full": [round(ratio, 3) for ratio in row.times(full)],
    }


def _errors(errors: Sequence[WordErrors], full: Sequence[WordErrors]) -> dict[str, Any]:
    return {
        "wer": round(total(errors).wer, 3),
        "interval": [round(bound, 3) for bound in interval(errors)],
        "points": [round(value, 3) for value in difference(errors, full)],
    }


def print_table(title: str, rows: Iterable[dict[str, Any]]) -> None:
    """The rows of one checkpoint and one set."""
    columns = ("slack", "positions", "WER, one look", "above full (95 %)", "encoded twice")
    columns += ("WER, two looks", "above full (95 %)", "files/s", "two looks", "x full")
    table = Table(*columns, title=title)
    for row in rows:
        first, second = row["first_look"], row["second_look"]
        table.add_row(
            row["slack"],
            f"{row['positions']:.0f}",
            f"{first['wer']:.2f} %",
            _points(first["points"]),
            f"{100 * row['encoded_twice']:.1f} %",
            f"{second['wer']:.2f} %",
            _points(second["points"]),
            *(f"{rate:.2f}" for rate in row["files_per_s"]),
            f"{row['times_full'][1]:.2f}",
        )
    Console(width=150).print(table)


def _points(points: Sequence[float]) -> str:
    value, low, high = points
    return f"{value:+.2f} ({low:+.2f} to {high:+.2f})"
