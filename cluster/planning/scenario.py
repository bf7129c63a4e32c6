"""Input and output of a simulation: the cluster, the load and the objective; the outcome.

A seed gives the same requests to every cluster. Rates and shares are over the seconds of the load,
without the first tenth.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import numpy as np
from pydantic import Field, FiniteFloat, PositiveFloat, ValidationError, model_validator

from cluster.common.errors import ConfigurationError
from cluster.common.messages import FRAMES_PER_S, WINDOW_S, Priority
from cluster.common.settings import FrozenModel, Settings
from cluster.common.settings_sources import first_problem
from cluster.planning.profile import Profile

SHORTEST_CUT_S = 20.0  # the cutter looks for a pause in the last 10 s of a full window
TIMESTAMPS = 2  # tokens of a window beside its text
TOKENS_PER_S = 3.2  # text tokens for a second of audio
WARM_UP = 0.1  # share of the load's seconds
PERCENTILES = (50, 95, 99)
# The settings that a summary contains; the others may hold keys.
TOLD: Any = {"placement": True, **{key: {"replicas"} for key in ("router", "encoder", "decoder")}}


class Lengths(FrozenModel):
    """Seconds of audio of a request: a log-normal distribution, clipped to `max_s`."""

    median_s: float = Field(5.0, gt=0)
    sigma: float = Field(0.4, ge=0, description="of the logarithm; 0: all have the median")
    max_s: float = Field(30.0, gt=0)


def n_tokens(content_frames: int) -> int:
    return TIMESTAMPS + round(TOKENS_PER_S * content_frames / FRAMES_PER_S)


# Clips as in SeedTTS and Earnings22 (medians of 5 s), talks of minutes, and both.
NAMED_LENGTHS: dict[str, Lengths] = {
    "short": Lengths(median_s=5.0, sigma=0.4, max_s=30.0),
    "mixed": Lengths(median_s=10.0, sigma=1.2, max_s=1800.0),
    "long": Lengths(median_s=600.0, sigma=0.8, max_s=7200.0),
}


class Load(FrozenModel):
    """A Poisson process of requests."""

    rate_per_s: FiniteFloat = Field(10.0, gt=0, description="mean requests per second")
    seconds: FiniteFloat = Field(300.0, gt=0, description="during which requests come")
    lengths: Lengths = NAMED_LENGTHS["short"]
    classes: dict[Priority, PositiveFloat] = Field(
        {"interactive": 1.0}, min_length=1, description="their shares"
    )


class Scenario(FrozenModel):
    """Workers fill one node after another, each role on nodes of its own."""

    profile: str = "two-cores"
    per_node: int = Field(0, ge=0, description="workers of a node; 0: all are on one node")
    link_gbit_per_s: float | None = Field(
        None, gt=0, description="between nodes; unset: as the profile's hand-off"
    )
    load: Load = Load()
    slo_s: float = Field(1.0, gt=0, description="a request is good that is answered within it")
    settings: Settings = Settings()
    seed: int = 0

    @model_validator(mode="after")
    def _simulable(self) -> Scenario:
        if self.settings.handoff != "cross_kv":
            raise ValueError("settings.handoff: only the hand-off of cross_kv is simulated")
        if self.settings.models:
            raise ValueError("settings.models: only one model is simulated, that of the profile")
        if self.settings.placement == "colocated" and self.settings.encoder.replicas > 1:
            raise ValueError(
                "a colocated worker is a cell of its own: simulate one, with its share of the load"
            )
        return self


_Asked = TypeVar("_Asked", Scenario, Load)


def checked(kind: type[_Asked], fields: dict[str, Any]) -> _Asked:
    """Raises ConfigurationError, which names the field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(f"{kind.__name__.lower()}: {first_problem(error)}") from error


@dataclass(slots=True, eq=False)
class LoadRequest:
    """cuts_s: the ends of its windows, in seconds of its audio."""

    name: str
    at_s: float
    audio_s: float
    priority: Priority
    cuts_s: tuple[float, ...]


Arrival = tuple[float, float, Priority]  # time in seconds, seconds of audio


def arrivals(
    load: Load, random: Random, rows: Sequence[Arrival] | None = None
) -> Iterator[LoadRequest]:
    """Yield requests in the order of their arrival, drawn from `load` if no rows are given."""
    drawn = _drawn(load, random) if rows is None else sorted(rows, key=lambda row: row[0])
    for number, (at_s, audio_s, priority) in enumerate(drawn):
        cuts = tuple(_cuts(audio_s, random))
        yield LoadRequest(f"r{number}", at_s, audio_s, priority, cuts)


def _drawn(load: Load, random: Random) -> Iterator[Arrival]:
    lengths, classes, shares = load.lengths, list(load.classes), list(load.classes.values())
    at_s = 0.0
    while (at_s := at_s + random.expovariate(load.rate_per_s)) < load.seconds:
        priority = random.choices(classes, shares)[0]
        audio_s = lengths.median_s * math.exp(lengths.sigma * random.gauss(0.0, 1.0))
        yield at_s, min(audio_s, lengths.max_s), priority


def _cuts(audio_s: float, random: Random) -> Iterator[float]:
    """Yield ends of windows, each in the last third of 30 s, where the cutter finds a pause."""
    begin_s = 0.0
    while audio_s - begin_s > WINDOW_S:
        begin_s += random.uniform(SHORTEST_CUT_S, WINDOW_S)
        yield begin_s
    yield audio_s


@dataclass(slots=True)
class Outcome:
    """answers: arrival, audio and latency in seconds, by class; infinite latency: it failed.

    moments: each second, with busy shares and pages in use from 0 to 1. seconds: until the end.
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

    def latencies(self) -> list[float]:
        """In seconds, of all requests after the warm-up."""
        begin_s = WARM_UP * self.scenario.load.seconds
        every = self.answers.values()
        return [late_s for rows in every for at_s, _, late_s in rows if at_s >= begin_s]

    def busy(self) -> dict[str, float]:
        """Return the means of the moments after the warm-up, and the most pending requests."""
        seconds = self.scenario.load.seconds
        begin_s = WARM_UP * seconds
        seen = [one for one in self.moments if begin_s < one["at_s"] <= seconds] or self.moments
        names = (name for name in seen[0] if name not in ("at_s", "pending"))
        means = {name: round(float(np.mean([one[name] for one in seen])), 4) for name in names}
        return means | {"most_pending": max(one["pending"] for one in seen)}

    def summary(self) -> dict[str, Any]:
        classes = {name: self._of_class(name) for name in sorted(self.answers)}
        every = (row for rows in self.answers.values() for row in rows)
        audio_s = sum(audio_s for _, audio_s, late_s in every if late_s < math.inf)
        return {
            "profile": self.profile.origin(),
            "scenario": self.scenario.model_dump(mode="json", exclude={"settings"}),
            "settings": self.scenario.settings.model_dump(include=TOLD),
            "simulated_s": round(self.seconds, 3),
            "requests": self.n_requests,
            "goodput_per_s": round(sum(one["goodput_per_s"] for one in classes.values()), 3),
            "audio_s_per_s": round(audio_s / max(self.seconds, 1e-9), 2),
            "classes": classes,
            "utilisation": self.busy(),
            "decisions": self.decisions,
            "moments": self.moments,
        }

    def _of_class(self, name: Priority) -> dict[str, Any]:
        seconds, slo_s = self.scenario.load.seconds, self.scenario.slo_s
        at_s, _, late_s = np.array(self.answers[name]).T
        counted, span_s = late_s[at_s >= WARM_UP * seconds], (1 - WARM_UP) * seconds
        answered, n_good = counted[np.isfinite(counted)], int((counted <= slo_s).sum())
        return {
            "answered": int(np.isfinite(late_s).sum()),
            "failed": dict(sorted(self.failures[name].items())),
            "throughput_per_s": round(len(answered) / span_s, 3),
            "goodput_per_s": round(n_good / span_s, 3),
            "within_slo": round(n_good / max(1, len(counted)), 4),
            **(percentiles(answered) if len(answered) else {}),
        }


def at_percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent, method="higher")) if len(values) else math.inf


def percentiles(latencies: Sequence[float]) -> dict[str, float | None]:
    """None stands for an infinite latency, which JSON cannot express."""
    seen = {f"p{p}_s": at_percentile(latencies, p) for p in PERCENTILES}
    return {name: round(one, 4) if one < math.inf else None for name, one in seen.items()}
