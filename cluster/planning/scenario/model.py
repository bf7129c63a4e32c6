"""What is to be simulated: a cluster, a load, faults, and what counts as good.

A scenario is one YAML or JSON file, or what the flags of `splitscribe simulate` make of the
defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import ConfigurationError
from cluster.messages import Priority, Role
from cluster.planning.profile.shipped import first_problem
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
