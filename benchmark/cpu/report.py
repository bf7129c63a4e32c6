"""The rows of `benchmark.cpu`: what each system reached, how they compare, and the tables of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.shared.machine import median_ratio
from benchmark.shared.word_errors import WordErrors, interval, total

OURS = "splitscribe"
LIBRARIES = ("faster-whisper", "transformers", "openai-whisper")
IN_FLIGHT = (1, 8)
TRIMMED = "trimmed"  # behind a dtype: the encoder's context is, as for the bundled model


@dataclass
class Row:
    """One system on one shape. rate: files/s of each round; wall: ms of each file alone."""

    system: str
    rate: dict[int, list[float]] = field(default_factory=dict)
    wall_ms: dict[int, list[float]] = field(default_factory=dict)
    n_tokens: int = 0
    rss_bytes: int = 0
    pss_bytes: int = 0

    def median_rate(self, in_flight: int) -> float:
        return statistics.median(self.rate[in_flight])

    def median_ms(self, in_flight: int) -> float:
        return statistics.median(self.wall_ms[in_flight])


def best_of(rows: Sequence[Row], kind: str, in_flight: int, context: str = "") -> Row | None:
    """The fastest system whose name begins with `kind`, and ends with `context` or not."""
    those = [row for row in rows if row.system.startswith(kind)]
    those = [row for row in those if row.system.endswith(TRIMMED) == bool(context)]
    return max(those, key=lambda row: row.median_rate(in_flight), default=None)


def comparisons(shape: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Our best, full and trimmed, against the best of each library; and trimmed against full."""
    found = []
    for in_flight in IN_FLIGHT:
        for context in ("", TRIMMED):
            ours = best_of(rows, OURS, in_flight, context)
            for library in (*LIBRARIES, *([OURS] if context else [])):
                theirs = best_of(rows, library, in_flight)
                if ours is None or theirs is None:
                    continue
                times = median_ratio(ours.rate[in_flight], theirs.rate[in_flight])
                found.append(
                    {
                        "shape": shape,
                        "in_flight": in_flight,
                        "ours": ours.system,
                        "theirs": theirs.system,
                        "ratio": round(times, 3),
                    }
                )
    return found


def row_json(shape: str, row: Row, errors: Mapping[str, Sequence[WordErrors]]) -> dict[str, Any]:
    counted = errors.get(row.system)
    return {
        "shape": shape,
        "system": row.system,
        "n_tokens": row.n_tokens,
        "files_per_s": {str(n): round(row.median_rate(n), 3) for n in IN_FLIGHT},
        "rates": {str(n): [round(rate, 3) for rate in row.rate[n]] for n in IN_FLIGHT},
        "wall_ms": {str(n): round(row.median_ms(n), 1) for n in IN_FLIGHT},
        "wer": round(total(counted).wer, 3) if counted else None,
        "wer_interval": [round(bound, 3) for bound in interval(counted)] if counted else None,
        "peak_rss_mb": round(row.rss_bytes / 1e6, 1),
        "peak_pss_mb": round(row.pss_bytes / 1e6, 1),
    }
