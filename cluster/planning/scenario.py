"""What is to be simulated: a cluster, a load, faults, and what counts as good.

A scenario is one YAML or JSON file, or what the flags of `splitscribe simulate` make of the
defaults. A load becomes requests with times, lengths and cuts: by chance, or from a trace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import ConfigurationError
from cluster.messages import FRAMES_PER_S, WINDOW_S, Priority, Role
from cluster.planning.profile import first_problem
from cluster.settings import Settings

Shape = Literal["poisson", "diurnal", "bursts", "trace"]
LengthName = Literal["short", "mixed", "long"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Lengths(_Frozen):
    """Seconds of audio in a request: a log-normal distribution, cut at both ends."""

    median_s: float = Field(5.0, gt=0, description="half of the requests are shorter")
    sigma: float = Field(0.4, ge=0, description="of the logarithm; 0: all have the median")
    min_s: float = Field(0.5, gt=0)
    max_s: float = Field(30.0, gt=0)
    tokens_per_s: float = Field(3.2, ge=0, description="text tokens for a second of audio")

    @model_validator(mode="after")
    def _bounds(self) -> Lengths:
        if self.min_s > self.max_s:
            raise ValueError("min_s must not be above max_s")
        return self


# Clips as of SeedTTS and Earnings22 (medians of 5 s), talks of minutes, and both.
NAMED_LENGTHS: dict[str, Lengths] = {
    "short": Lengths(median_s=5.0, sigma=0.4, max_s=30.0),
    "mixed": Lengths(median_s=10.0, sigma=1.2, max_s=1800.0),
    "long": Lengths(median_s=600.0, sigma=0.8, min_s=60.0, max_s=7200.0),
}


class Load(_Frozen):
    """Requests as they come, of clients that do not wait for each other.

    diurnal: the rate follows a sine around its mean, within `period_s`, by `swing` of it.
    bursts: every `period_s` the rate is `burst_factor` times as high, for `burst_s`.
    trace: a file with a JSON object a line: `at_s` and `audio_s`, and perhaps `priority`.
    """

    kind: Shape = "poisson"
    rate_per_s: float = Field(10.0, gt=0, description="mean requests per second outside of bursts")
    seconds: float = Field(300.0, gt=0, description="during which requests come")
    lengths: Lengths = NAMED_LENGTHS["short"]
    classes: dict[Priority, float] = Field(
        {"interactive": 1.0}, description="share of the requests of each class"
    )
    language_known: bool = Field(True, description="clients say which language is spoken")
    period_s: float = Field(300.0, gt=0)
    swing: float = Field(0.5, ge=0, le=1)
    burst_factor: float = Field(5.0, ge=1)
    burst_s: float = Field(10.0, gt=0)
    trace: Path | None = None

    @model_validator(mode="after")
    def _complete(self) -> Load:
        if (self.kind == "trace") != (self.trace is not None):
            raise ValueError("a trace file belongs to the kind 'trace', and to no other")
        if not self.classes or sum(self.classes.values()) <= 0:
            raise ValueError("classes must have shares above 0")
        return self


class Cluster(_Frozen):
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
    dollars_per_hour: float = Field(0.0, ge=0, description="of one encoder, decoder or worker")


class Kill(_Frozen):
    """A worker ends at once, as by SIGKILL; Serve starts another one in its place."""

    at_s: float = Field(ge=0)
    role: Role
    count: int = Field(1, ge=1, description="workers that end at the same time")


class RackLoss(_Frozen):
    """A share of the workers of every pool ends at once, as when a rack loses its power."""

    at_s: float = Field(ge=0)
    share: float = Field(0.05, gt=0, le=1)


class Slo(_Frozen):
    """A request is good when it is answered within `latency_s` and `per_audio_s` of its length."""

    latency_s: float = Field(1.0, gt=0)
    per_audio_s: float = Field(0.1, ge=0)

    def limit_s(self, audio_s: float) -> float:
        return self.latency_s + self.per_audio_s * audio_s


class Scenario(_Frozen):
    """All that a simulation is made of, beside its profile's figures."""

    profile: str = "two-cores"
    cluster: Cluster = Cluster()
    load: Load = Load()
    faults: tuple[Kill, ...] = ()
    racks: tuple[RackLoss, ...] = ()
    slo: Slo = Slo()
    settings: Settings = Settings()
    seed: int = 0


def read_scenario(file: Path) -> dict[str, Any]:
    """The fields that a YAML or JSON file sets.

    Raises:
        ConfigurationError: it cannot be read, or is no mapping.
    """
    try:
        fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read the scenario {file}: {error}") from error
    if fields is None:
        return {}
    if not isinstance(fields, dict):
        raise ConfigurationError(f"the scenario {file} must be a mapping of fields")
    return fields


def make_scenario(fields: dict[str, Any]) -> Scenario:
    """A checked scenario.

    Raises:
        ConfigurationError: which names the field.
    """
    try:
        return Scenario.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(f"the scenario: {first_problem(error)}") from error


SHORTEST_CUT_S = 20.0  # the cutter looks for a pause in the last 10 s of a full window
TIMESTAMPS = 2  # tokens of a window beside its text
LEAST_AUDIO_S = 0.1


@dataclass(slots=True, eq=False)
class LoadRequest:
    """One upload. tokens_per_s: of its text. cuts_s: where its windows end."""

    number: int
    at_s: float
    audio_s: float
    priority: Priority
    tokens_per_s: float
    cuts_s: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"r{self.number}"


@dataclass(slots=True)
class Traffic:
    """The requests that are under way, by their ids; tokens_per_s: of others."""

    requests: dict[str, LoadRequest] = field(default_factory=dict)
    tokens_per_s: float = 0.0

    def tokens_of(self, request_id: str, content_frames: int) -> int:
        """Tokens of a window with so many mel frames of audio; with its timestamps."""
        request = self.requests.get(request_id)
        per_s = self.tokens_per_s if request is None else request.tokens_per_s
        return TIMESTAMPS + round(per_s * content_frames / FRAMES_PER_S)


def arrivals(load: Load, random: Random) -> Iterator[LoadRequest]:
    """All requests, in the order in which they come.

    Raises:
        ConfigurationError: a trace cannot be read.
    """
    if load.trace is not None:
        yield from _of_trace(load, load.trace, random)
        return
    classes, shares = list(load.classes), list(load.classes.values())
    highest = _highest_rate(load)
    at_s, number = 0.0, 0
    while (at_s := at_s + random.expovariate(highest)) < load.seconds:
        if random.random() * highest >= rate_at(load, at_s):
            continue  # thinning (Lewis and Shedler 1979): what is left has the rate of the moment
        priority = classes[0] if len(classes) == 1 else random.choices(classes, shares)[0]
        yield make_request(number, at_s, _length(load.lengths, random), priority, load, random)
        number += 1


def rate_at(load: Load, at_s: float) -> float:
    """Requests per second that are expected at a moment."""
    if load.kind == "diurnal":
        return load.rate_per_s * (1 + load.swing * math.sin(2 * math.pi * at_s / load.period_s))
    if load.kind == "bursts" and at_s % load.period_s >= load.period_s - load.burst_s:
        return load.rate_per_s * load.burst_factor
    return load.rate_per_s


def make_request(
    number: int, at_s: float, audio_s: float, priority: Priority, load: Load, random: Random
) -> LoadRequest:
    """A request with its cuts."""
    cuts = tuple(_cuts(audio_s, random))
    return LoadRequest(number, at_s, audio_s, priority, load.lengths.tokens_per_s, cuts)


def _highest_rate(load: Load) -> float:
    if load.kind == "diurnal":
        return load.rate_per_s * (1 + load.swing)
    return load.rate_per_s * (load.burst_factor if load.kind == "bursts" else 1.0)


def _length(lengths: Lengths, random: Random) -> float:
    drawn_s = lengths.median_s * math.exp(lengths.sigma * random.gauss(0.0, 1.0))
    return min(max(drawn_s, lengths.min_s), lengths.max_s)


def _cuts(audio_s: float, random: Random) -> Iterator[float]:
    """Ends of windows: somewhere in the last third of 30 s, as pauses come."""
    begin_s = 0.0
    while audio_s - begin_s > WINDOW_S:
        begin_s += random.uniform(SHORTEST_CUT_S, WINDOW_S)
        yield begin_s
    yield audio_s


def _of_trace(load: Load, file: Path, random: Random) -> Iterator[LoadRequest]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the trace {file}: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            at_s, audio_s = float(row["at_s"]), max(LEAST_AUDIO_S, float(row["audio_s"]))
            rows.append((at_s, audio_s, row.get("priority", "interactive")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{file}, line {number}: expected an object with at_s and audio_s: {error!r}"
            ) from error
    for number, (at_s, audio_s, priority) in enumerate(sorted(rows)):
        if at_s < load.seconds:
            yield make_request(number, at_s, audio_s, priority, load, random)
