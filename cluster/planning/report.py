"""What is noted while a simulation runs, and what it says: one JSON object of figures.

Rates and shares are over the time in which requests came, without the first tenth, in which the
cluster fills up. Latencies are of the requests that came in that time.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.common.messages import Priority
from cluster.planning.profile import Profile
from cluster.planning.scenario import Scenario
from cluster.planning.transfer import Traffic

WARM_UP = 0.1  # of the load's seconds
PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Answers:
    """Requests of one class, as columns, in the order in which they ended.

    latency_s: infinite of those that failed. failures: by status and code.
    """

    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    audio_s: array[float] = field(default_factory=lambda: array("d"))
    latency_s: array[float] = field(default_factory=lambda: array("d"))
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, arrived_s: float, audio_s: float, latency_s: float) -> None:
        self.arrived_s.append(arrived_s)
        self.audio_s.append(audio_s)
        self.latency_s.append(latency_s)

    def rows(self) -> Iterator[tuple[float, float, float]]:
        """Arrival, audio and latency of each."""
        return zip(self.arrived_s, self.audio_s, self.latency_s, strict=True)


@dataclass(frozen=True, slots=True)
class Noted:
    """A decision, or something that happened to the cluster."""

    at_s: float
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Moment:
    """The cluster at one second: workers there, busy shares and pages in use, of 0 to 1."""

    at_s: float
    encoders: int
    decoders: int
    encoder_busy: float
    decoder_busy: float
    encoder_pages: float
    decoder_pages: float
    pending: int


@dataclass(slots=True)
class Records:
    """All of one simulation. retries: of windows, by reason."""

    answers: dict[Priority, Answers] = field(default_factory=dict)
    noted: list[Noted] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)
    n_requests: int = 0

    def of(self, priority: Priority) -> Answers:
        return self.answers.setdefault(priority, Answers())

    def note(self, at_s: float, what: str, why: str) -> None:
        self.noted.append(Noted(round(at_s, 3), what, why))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scenario that has run. seconds: simulated, until the last answer."""

    scenario: Scenario
    profile: Profile
    records: Records
    seconds: float
    traffic: dict[tuple[str, str], Traffic]

    def latencies(self) -> list[float]:
        """Of all requests after the warm-up, in rising order; failed ones are infinite."""
        begin_s = WARM_UP * self.scenario.load.seconds
        every = self.records.answers.values()
        return sorted(row[2] for one in every for row in one.rows() if row[0] >= begin_s)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest one of `values`, which rise; infinite of none."""
    if not values:
        return math.inf
    return values[min(len(values) - 1, int(percent / 100 * len(values)))]


def summary(outcome: Outcome, run_time_s: float) -> dict[str, Any]:
    """All figures; `run_time_s` is how long the simulation took on this machine."""
    scenario, records = outcome.scenario, outcome.records
    classes = {
        name: _of_class(answers, scenario) for name, answers in sorted(records.answers.items())
    }
    answers = records.answers.values()
    audio_s = sum(audio for one in answers for _, audio, late in one.rows() if late < math.inf)
    return {
        "profile": outcome.profile.model_dump(include={"name", "model", "predicted", "source"}),
        "scenario": scenario.model_dump(mode="json", exclude={"settings"}),
        "simulated_s": round(outcome.seconds, 3),
        "run_time_s": round(run_time_s, 2),
        "requests": records.n_requests,
        "us_per_request": round(1e6 * run_time_s / max(1, records.n_requests)),
        "goodput_per_s": round(sum(one["goodput_per_s"] for one in classes.values()), 3),
        "throughput_per_s": round(sum(one["throughput_per_s"] for one in classes.values()), 3),
        "audio_s_per_s": round(audio_s / max(outcome.seconds, 1e-9), 2),
        "classes": classes,
        "utilisation": _utilisation(records.moments, scenario),
        "kv_traffic": {
            f"{source} -> {target}": {
                "reads": told.n_reads,
                "gigabytes": round(told.n_bytes / 1e9, 3),
                "mean_read_s": round(told.seconds / told.n_reads, 6),
            }
            for (source, target), told in sorted(outcome.traffic.items())
        },
        "retries": dict(sorted(records.retries.items())),
        "decisions": [asdict(noted) for noted in records.noted],
        "moments": [asdict(moment) for moment in records.moments],
    }


def lines_of(figures: dict[str, Any]) -> Iterator[str]:
    """The figures that people look at first."""
    yield (
        f"{figures['requests']} requests in {figures['simulated_s']:g} simulated seconds; "
        f"this took {figures['run_time_s']:g} s"
    )
    yield (
        f"goodput {figures['goodput_per_s']:g} requests/s, answered "
        f"{figures['throughput_per_s']:g} requests/s, "
        f"{figures['audio_s_per_s']:g} s of audio per second"
    )
    for name, one in figures["classes"].items():
        times = ", ".join(f"p{p} {one[f'p{p}_s']:g} s" for p in PERCENTILES if f"p{p}_s" in one)
        failed = "".join(f", {n} failed with {why}" for why, n in one["failed"].items())
        yield f"{name}: {times or 'no answer'}, {one['within_slo']:.1%} good{failed}"
    if used := figures["utilisation"]:
        yield (
            f"busy: encoders {used['encoder_busy']:.0%}, decoders {used['decoder_busy']:.0%}; "
            f"pages: export {used['encoder_pages']:.0%}, decode {used['decoder_pages']:.0%}; "
            f"at most {used['most_pending']} requests pending"
        )
    for one in figures["decisions"]:
        yield f"at {one['at_s']:g} s: {one['what']} ({one['why']})"


def _of_class(answers: Answers, scenario: Scenario) -> dict[str, Any]:
    begin_s, end_s = WARM_UP * scenario.load.seconds, scenario.load.seconds
    counted = [
        (audio_s, latency_s)
        for at_s, audio_s, latency_s in answers.rows()
        if begin_s <= at_s < end_s and latency_s < math.inf
    ]
    latencies = sorted(latency_s for _, latency_s in counted)
    good = sum(latency_s <= scenario.slo.limit_s(audio_s) for audio_s, latency_s in counted)
    span_s = end_s - begin_s
    found: dict[str, Any] = {
        "answered": len(answers.latency_s) - answers.failures.total(),
        "failed": dict(sorted(answers.failures.items())),
        "throughput_per_s": round(len(counted) / span_s, 3),
        "goodput_per_s": round(good / span_s, 3),
        "within_slo": round(good / len(counted), 4) if counted else 0.0,
    }
    if latencies:
        found |= {f"p{p}_s": round(percentile(latencies, p), 4) for p in PERCENTILES}
    return found


def _utilisation(moments: Sequence[Moment], scenario: Scenario) -> dict[str, float]:
    """Means over the time, and the highest number of requests that were pending."""
    begin_s, end_s = WARM_UP * scenario.load.seconds, scenario.load.seconds
    seen = [moment for moment in moments if begin_s < moment.at_s <= end_s] or list(moments)
    if not seen:
        return {}
    names = [name for name in asdict(seen[0]) if name not in ("at_s", "pending")]
    means = {name: round(sum(getattr(one, name) for one in seen) / len(seen), 4) for name in names}
    return means | {"most_pending": max(moment.pending for moment in seen)}
