"""The requests of a load: when each comes, how long its audio is, and how much is said in it.

All of it is drawn from one source of chance, in the order of the arrivals, so that a seed gives the
same requests whatever the cluster does with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from cluster.errors import ConfigurationError
from cluster.messages import FRAMES_PER_S, WINDOW_S, Priority
from cluster.planning.scenario.model import Lengths, Load

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
