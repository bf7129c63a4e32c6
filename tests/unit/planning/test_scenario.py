"""Loads come as they are described, and scenarios are checked."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest

from cluster.common.errors import ConfigurationError
from cluster.common.messages import WINDOW_S
from cluster.planning.scenario import (
    NAMED_LENGTHS,
    Load,
    Scenario,
    arrivals,
    checked,
    percentiles,
)


def test_a_poisson_load_has_its_rate_and_its_median() -> None:
    load = Load(rate_per_s=50.0, seconds=200.0)
    requests = list(arrivals(load, Random(0)))
    assert len(requests) == pytest.approx(10_000, rel=0.05)
    lengths = sorted(request.audio_s for request in requests)
    assert lengths[len(lengths) // 2] == pytest.approx(5.0, rel=0.05)
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)


def test_windows_cover_their_audio_and_are_never_too_long() -> None:
    load = Load(lengths=NAMED_LENGTHS["long"], rate_per_s=1.0, seconds=100.0)
    for request in arrivals(load, Random(0)):
        assert request.cuts_s[-1] == request.audio_s
        starts = (0.0, *request.cuts_s)
        lengths = [end - start for start, end in zip(starts, request.cuts_s, strict=False)]
        assert all(0 < length <= WINDOW_S for length in lengths)


def test_a_percentile_of_requests_that_failed_is_none() -> None:
    latencies = [0.5] * 97 + [math.inf] * 3
    assert percentiles(latencies) == {"p50_s": 0.5, "p95_s": 0.5, "p99_s": None}


def test_given_rows_come_in_the_order_of_their_times() -> None:
    first, second = arrivals(Load(), Random(0), [(2.0, 7.0, "bulk"), (1.0, 3.0, "interactive")])
    assert (first.at_s, first.audio_s, first.priority) == (1.0, 3.0, "interactive")
    assert (second.at_s, second.priority) == (2.0, "bulk")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"load": {"rate_per_s": 0}}, "load.rate_per_s"),
        ({"load": {"rate_per_s": math.inf}}, "load.rate_per_s"),  # which would never end
        ({"load": {"seconds": math.inf}}, "load.seconds"),
        ({"settings": {"encoders": 2}}, "settings.encoders"),
        ({"settings": {"placement": "colocated", "encoder": {"replicas": 2}}}, "its own"),
        ({"settings": {"handoff": "encoder_states"}}, "settings.handoff"),
        ({"settings": {"models": {"tiny": {"model": "tiny"}}}}, "settings.models"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigurationError, match=place):
        checked(Scenario, fields)
