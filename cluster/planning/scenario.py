"""What is to be simulated: a cluster, a load, faults, and what counts as good.

A seed gives the same requests whatever the cluster does with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from cluster.common.errors import ConfigurationError
from cluster.common.messages import FRAMES_PER_S, WINDOW_S, Priority, Role
from cluster.common.settings import FrozenModel, Settings
from cluster.common.settings_sources import first_problem

SHORTEST_CUT_S = 20.0  # the cutter looks for a pause in the last 10 s of a full window
TIMESTAMPS = 2  # tokens of a window beside its text


class Lengths(FrozenModel):
    """Seconds of audio in a request: a log-normal distribution, cut at both ends."""

    median_s: float = Field(5.0, gt=0)
    sigma: float = Field(0.4, ge=0, description="of the logarithm; 0: all have the median")
    min_s: float = Field(0.5, gt=0)
    max_s: float = Field(30.0, gt=0)
    tokens_per_s: float = Field(3.2, ge=0, description="text tokens for a second of audio")

    @model_validator(mode="after")
    def _bounds(self) -> Lengths:
        if self.min_s > self.max_s:
            raise ValueError("min_s must not be above max_s")
        return self

    def n_tokens(self, content_frames: int) -> int:
        """Of a window with so many mel frames of audio; with its timestamps."""
        return TIMESTAMPS + round(self.tokens_per_s * content_frames / FRAMES_PER_S)


# Clips as of SeedTTS and Earnings22 (medians of 5 s), talks of minutes, and both.
NAMED_LENGTHS: dict[str, Lengths] = {
    "short": Lengths(median_s=5.0, sigma=0.4, max_s=30.0),
    "mixed": Lengths(median_s=10.0, sigma=1.2, max_s=1800.0),
    "long": Lengths(median_s=600.0, sigma=0.8, min_s=60.0, max_s=7200.0),
}


class Load(FrozenModel):
    """Requests of clients that do not wait for each other: a Poisson process."""

    rate_per_s: float = Field(10.0, gt=0, description="mean requests per second")
    seconds: float = Field(300.0, gt=0, description="during which requests come")
    lengths: Lengths = NAMED_LENGTHS["short"]
    classes: dict[Priority, float] = Field({"interactive": 1.0}, description="their shares")
    language_known: bool = Field(True, description="clients say which language is spoken")

    @model_validator(mode="after")
    def _complete(self) -> Load:
        if not self.classes or sum(self.classes.values()) <= 0:
            raise ValueError("classes must have shares above 0")
        return self


class Cluster(FrozenModel):
    """Workers and where they are. Workers fill up one node after another, each role by itself."""

    placement: Literal["split", "colocated"] = "split"
    routers: int = Field(1, ge=1, description="each with its own event loop and audio workers")
    encoders: int = Field(1, ge=1, description="of colocated workers: how many there are")
    decoders: int = Field(1, ge=1, description="ignored where workers are colocated")
    per_node: int = Field(0, ge=0, description="workers of a node; 0: all are on one node")
    link_gbit_per_s: float | None = Field(
        None, gt=0, description="between nodes; unset: as the profile's hand-off"
    )
    link_latency_s: float = Field(20e-6, ge=0, description="of a READ between nodes")


class Kill(FrozenModel):
    """A worker ends at once, as by SIGKILL; Serve starts another one in its place."""

    at_s: float = Field(ge=0)
    role: Role
    count: int = Field(1, ge=1, description="workers that end at the same time")


class Slo(FrozenModel):
    """A request is good when it is answered within `latency_s` and `per_audio_s` of its length."""

    latency_s: float = Field(1.0, gt=0)
    per_audio_s: float = Field(0.1, ge=0)


class Scenario(FrozenModel):
    profile: str = "two-cores"
    cluster: Cluster = Cluster()
    load: Load = Load()
    faults: tuple[Kill, ...] = ()
    slo: Slo = Slo()
    settings: Settings = Settings()
    seed: int = 0

    @model_validator(mode="after")
    def _simulable(self) -> Scenario:
        if self.settings.handoff != "cross_kv":
            raise ValueError("settings.handoff: only the hand-off of cross_kv is simulated")
        return self


def make_scenario(fields: dict[str, Any]) -> Scenario:
    """Raises ConfigurationError, which names the field."""
    try:
        return Scenario.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(f"the scenario: {first_problem(error)}") from error


@dataclass(slots=True, eq=False)
class LoadRequest:
    """One upload. cuts_s: where its windows end."""

    name: str
    at_s: float
    audio_s: float
    priority: Priority
    cuts_s: tuple[float, ...]


Arrival = tuple[float, float, Priority]  # at a second, so many seconds of audio


def arrivals(
    load: Load, random: Random, rows: Sequence[Arrival] | None = None
) -> Iterator[LoadRequest]:
    """All `LoadRequest`s in the order in which they come: drawn, or those of given rows."""
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
        yield at_s, min(max(audio_s, lengths.min_s), lengths.max_s), priority


def _cuts(audio_s: float, random: Random) -> Iterator[float]:
    """Ends of windows: somewhere in the last third of 30 s, as pauses come."""
    begin_s = 0.0
    while audio_s - begin_s > WINDOW_S:
        begin_s += random.uniform(SHORTEST_CUT_S, WINDOW_S)
        yield begin_s
    yield audio_s
