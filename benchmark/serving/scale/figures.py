"""How a cost grows: a figure for each size, beside its ceiling, and the exponent between sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

SIZES = (10, 100, 1_000, 10_000)
BATCHES = 7  # the least of them is taken: what else runs on the machine only adds


@dataclass(frozen=True)
class Figure:
    """One cost at one size.

    what: what costs it. size: workers, peers or requests. ceiling: the same for the least that
    could do, in the same unit; None: there is no such thing. ours: what the project's code costs.
    """

    what: str
    size: int
    unit: str
    ceiling: float | None
    ours: float

    @property
    def ratio(self) -> float | None:
        return self.ours / self.ceiling if self.ceiling else None

    def as_json(self) -> dict[str, Any]:
        ratio = None if self.ratio is None else round(self.ratio, 2)
        return {**asdict(self), "ours": round(self.ours, 4), "ratio": ratio}


def cpu_us(operation: Callable[[], object], least_s: float = 0.05) -> float:
    """Processor time of one call on this thread, in microseconds: the least of some batches."""
    operation()
    began = time.thread_time()
    operation()
    one_s = max(time.thread_time() - began, 1e-7)
    count = max(1, round(least_s / one_s))
    batches = []
    for _ in range(BATCHES if one_s < least_s else 3):
        began = time.thread_time()
        for _ in range(count):
            operation()
        batches.append((time.thread_time() - began) / count)
    return 1e6 * min(batches)


def exponent(figures: list[Figure]) -> float:
    """x where the cost grows as the size to the power x, between the two largest sizes."""
    *_, smaller, larger = figures
    return math.log(larger.ours / smaller.ours) / math.log(larger.size / smaller.size)


def show(console: Console, figures: list[Figure]) -> dict[str, float]:
    """Print all, by what they cost; return how each grows."""
    growth: dict[str, float] = {}
    table = Table("what", "size", "unit", "ceiling", "ours", "ratio", "grows as")
    for what in dict.fromkeys(figure.what for figure in figures):
        rows = [figure for figure in figures if figure.what == what]
        if len(rows) > 1:
            growth[what] = round(exponent(rows), 2)
        for row in rows:
            is_last = row is rows[-1] and what in growth
            table.add_row(
                what if row is rows[0] else "",
                f"{row.size:,}",
                row.unit,
                "" if row.ceiling is None else f"{row.ceiling:,.4g}",
                f"{row.ours:,.4g}",
                "" if row.ratio is None else f"{row.ratio:,.1f}",
                f"size^{growth[what]:.2f}" if is_last else "",
            )
    console.print(table)
    return growth
