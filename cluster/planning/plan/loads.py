"""The loads of a plan's simulations: of one cell, for a short trial or for the final check.

Cells share nothing, so a cell has its share of the requests. Of a trace each cell gets requests by
chance, and a short trial its busiest stretch.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from cluster.errors import ConfigurationError
from cluster.planning.plan.order import Order
from cluster.planning.scenario.arrivals import arrivals
from cluster.planning.scenario.model import Load

SHORTEST_S, LONGEST_S = 20.0, 120.0  # of a trial
OBJECTIVES = 12  # a trial is so many times as long as the loosest objective


def rate_of_trace(file: Path) -> tuple[float, float]:
    """Requests per second of a trace, and its seconds.

    Raises:
        ConfigurationError: it cannot be read, or is too short.
    """
    requests = list(arrivals(Load(kind="trace", trace=file, seconds=1e12), Random(0)))
    if len(requests) < 2 or requests[-1].at_s <= requests[0].at_s:
        raise ConfigurationError(f"the trace {file} has fewer than two requests")
    seconds = requests[-1].at_s
    return len(requests) / (seconds - requests[0].at_s), seconds


def trial_seconds(order: Order, rate: float) -> float:
    """Of a short simulation."""
    seconds = min(LONGEST_S, max(SHORTEST_S, order.trial_requests / rate))
    return max(seconds, OBJECTIVES * order.loosest_s)


class CellLoads:
    """Loads of one of `cells` cells. folder: where parts of a trace are written."""

    def __init__(self, order: Order, folder: Path) -> None:
        self._order = order
        self._folder = folder

    def load(self, cells: float, seconds: float, seed: int, factor: float = 1.0) -> Load:
        """Of one cell, during so many seconds. factor: of the rate; a trace's gaps shrink."""
        load = self._order.load
        rate = factor * load.rate_per_s / cells
        if load.trace is None:
            return load.model_copy(update={"rate_per_s": rate, "seconds": seconds})
        return self._of_trace(load, cells, min(seconds, load.seconds), seed, factor)

    def _of_trace(self, load: Load, cells: float, seconds: float, seed: int, factor: float) -> Load:
        requests = list(arrivals(load.model_copy(update={"seconds": 1e12}), Random(seed)))
        begin_s = _busiest([one.at_s for one in requests], seconds * factor)
        chance = Random(seed)
        rows: list[dict[str, Any]] = [
            {
                "at_s": (one.at_s - begin_s) / factor,
                "audio_s": one.audio_s,
                "priority": one.priority,
            }
            for one in requests
            if begin_s <= one.at_s <= begin_s + seconds * factor and chance.random() * cells < 1
        ]
        file = self._folder / f"trace-{cells:g}-{seconds:g}-{seed}-{factor:g}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        rate = max(1, len(rows)) / seconds
        return load.model_copy(
            update={"trace": file, "seconds": seconds + 1e-3, "rate_per_s": rate}
        )


def _busiest(times_s: list[float], seconds: float) -> float:
    """Where the stretch of so many seconds begins that has the most requests."""
    first = most = 0
    begin_s = times_s[0] if times_s else 0.0
    for last, at_s in enumerate(times_s):
        while times_s[first] < at_s - seconds:
            first += 1
        if last - first + 1 > most:
            most, begin_s = last - first + 1, times_s[first]
    return begin_s
