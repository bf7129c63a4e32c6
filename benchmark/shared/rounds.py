"""Figures of things that took turns: what a round has in common is in no ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of ours divided by theirs, each ratio within one round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
