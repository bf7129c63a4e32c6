"""What is noted while a simulation runs, and what it says: one JSON object of figures.

Rates and shares are over the time in which requests came, without the first tenth.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.common.messages import Priority
from cluster.planning.profile import Profile
from cluster.planning.scenario import Scenario

WARM_UP = 0.1  # of the load's seconds
PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Outcome:
    """A scenario that runs, or has run. answers: by class, arrival, audio and latency in seconds,
    in the order of their ends; a failed one has an infinite latency. decisions: with what happened
    to the cluster. moments: the cluster at each second, busy shares and pages in use from 0 to 1.
    seconds: simulated, until the last answer.
    """

    scenario: Scenario
    profile: Profile
    answers: dict[Priority, list[tuple[float, float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    failures: dict[Priority, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    decisions: list[dict[str, Any]] = field(default_factory=list)
    moments: list[dict[str, float]] = field(default_factory=list)
    n_requests: int = 0
    seconds: float = 0.0

    def note(self, at_s: float, what: str, why: str) -> None:
        self.decisions.append({"at_s": round(at_s, 3), "what": what, "why": why})

    def latencies(self) -> list[float]:
        """Of all requests after the warm-up; failed ones are infinite."""
        begin_s = WARM_UP * self.scenario.load.seconds
        every = self.answers.values()
        return [late_s for rows in every for at_s, _, late_s in rows if at_s >= begin_s]

    def busy(self) -> dict[str, float]:
        """Means over the time, and the highest number of requests that were pending."""
        seconds = self.scenario.load.seconds
        begin_s = WARM_UP * seconds
        seen = [one for one in self.moments if begin_s < one["at_s"] <= seconds] or self.moments
        names = (name for name in seen[0] if name not in ("at_s", "pending"))
        means = {name: round(float(np.mean([one[name] for one in seen])), 4) for name in names}
        return means | {"most_pending": max(one["pending"] for one in seen)}

    def summary(self, run_time_s: float) -> dict[str, Any]:
        classes = {name: self._of_class(name) for name in sorted(self.answers)}
        every = (row for rows in self.answers.values() for row in rows)
        audio_s = sum(audio_s for _, audio_s, late_s in every if late_s < math.inf)
        return {
            "profile": self.profile.origin(),
            "scenario": self.scenario.model_dump(mode="json", exclude={"settings"}),
            "simulated_s": round(self.seconds, 3),
            "run_time_s": round(run_time_s, 2),
            "requests": self.n_requests,
            "goodput_per_s": round(sum(one["goodput_per_s"] for one in classes.values()), 3),
            "throughput_per_s": round(sum(one["throughput_per_s"] for one in classes.values()), 3),
            "audio_s_per_s": round(audio_s / max(self.seconds, 1e-9), 2),
            "classes": classes,
            "utilisation": self.busy(),
            "decisions": self.decisions,
            "moments": self.moments,
        }

    def _of_class(self, name: Priority) -> dict[str, Any]:
        seconds, slo = self.scenario.load.seconds, self.scenario.slo
        at_s, audio_s, late_s = np.array(self.answers[name]).T
        is_answered = np.isfinite(late_s)
        counted = is_answered & (at_s >= WARM_UP * seconds)
        good = counted & (late_s <= slo.latency_s + slo.per_audio_s * audio_s)
        n_counted, n_good, span_s = int(counted.sum()), int(good.sum()), (1 - WARM_UP) * seconds
        return {
            "answered": int(is_answered.sum()),
            "failed": dict(sorted(self.failures[name].items())),
            "throughput_per_s": round(n_counted / span_s, 3),
            "goodput_per_s": round(n_good / span_s, 3),
            "within_slo": round(n_good / max(1, n_counted), 4),
            **(percentiles(late_s[counted]) if n_counted else {}),
        }


def at_percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent, method="higher")) if len(values) else math.inf


def percentiles(latencies: Sequence[float]) -> dict[str, float]:
    return {f"p{p}_s": round(at_percentile(latencies, p), 4) for p in PERCENTILES}
