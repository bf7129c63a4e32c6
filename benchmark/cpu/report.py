"""The rows of `benchmark.cpu`: what each system reached."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.shared.word_errors import WordErrors, interval, total

OURS = "splitscribe"
IN_FLIGHT = (1, 8)
TRIMMED = "trimmed"  # behind a dtype: the encoder's context is, as for the bundled model


@dataclass
class Row:
    """One system on one shape. rate: files/s of each round; wall: ms of each file alone."""

    system: str
    rate: dict[int, list[float]] = field(default_factory=dict)
    wall_ms: dict[int, list[float]] = field(default_factory=dict)
    n_tokens: int = 0

    def median_rate(self, in_flight: int) -> float:
        return statistics.median(self.rate[in_flight])

    def median_ms(self, in_flight: int) -> float:
        return statistics.median(self.wall_ms[in_flight])


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
    }
