"""Seconds between and beyond the points of a profile: straight lines in both directions.

Between two sizes of a batch, and between two lengths of the context, seconds are on the line
through the neighbouring points. Beyond the outermost ones that line goes on, and never below the
smallest measured value, since a kernel's launch does not become cheaper by doing less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Knot = tuple[float, float]  # size, seconds


class Surface:
    """Seconds by a size (windows or rows) and a length (encoder positions)."""

    def __init__(self, points: Iterable[tuple[int, int, float]]) -> None:
        """points: size, length, seconds; at least one. For each length its own sizes."""
        by_length: dict[int, list[Knot]] = {}
        for size, length, seconds in points:
            by_length.setdefault(length, []).append((size, seconds))
        self._lines = [(length, sorted(knots)) for length, knots in sorted(by_length.items())]
        self._least_s = min(seconds for _, knots in self._lines for _, seconds in knots)
        self._known: dict[tuple[int, int], float] = {}

    def at(self, size: int, length: int) -> float:
        """Seconds for this size at this length."""
        key = (size, length)
        found = self._known.get(key)
        if found is None:
            knots = [(float(at), _on_line(line, size)) for at, line in self._lines]
            found = self._known[key] = max(self._least_s, _on_line(knots, length))
        return found


def _on_line(knots: list[Knot], x: float) -> float:
    if len(knots) == 1:
        return knots[0][1]
    upper = min(max(1, bisect_left(knots, (x, float("-inf")))), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[upper - 1], knots[upper]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
