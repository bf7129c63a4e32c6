"""Where the roles run: the rules, and what contradicts them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.common.errors import ConfigurationError
from cluster.common.settings import DecoderSettings, EncoderSettings
from cluster.common.settings_sources import load_settings
from cluster.serve.placement import Machine, place

CPU = Machine(0, True)
ONE_GPU = Machine(1, True)
EIGHT_GPUS = Machine(8, True)
NO_NIXL = Machine(0, False)
TWO_ENCODERS = {"encoder": {"replicas": 2}}
MAY_SLEEP = {role: {"min_replicas": 0} for role in ("encoder", "decoder")}


@pytest.mark.parametrize(
    ("machine", "flags", "kind", "gpus"),
    [
        (CPU, {}, "split", 0),
        (CPU, {"placement": "colocated"}, "colocated", 0),
        (NO_NIXL, {}, "colocated", 0),
        (CPU, {"transport": "memory"}, "colocated", 0),
        (ONE_GPU, {}, "colocated", 1),
        (ONE_GPU, {"placement": "split"}, "split", 0.5),
        (ONE_GPU, TWO_ENCODERS, "split", 0.3333),
        (ONE_GPU, MAY_SLEEP, "split", 0.5),
        (ONE_GPU, {"transport": "nixl"}, "split", 0.5),
        (ONE_GPU, {"encoder": {"device": "cpu"}, "decoder": {"device": "cpu"}}, "split", 0),
        (EIGHT_GPUS, {}, "split", 1),
        (EIGHT_GPUS, {"encoder": {"replicas": 6}, "decoder": {"replicas": 10}}, "split", 0.5),
        (CPU, {"encoder": {"device": "cuda"}, "decoder": {"device": "cuda"}}, "split", 0.5),
        (ONE_GPU, {"models": {n: {"model": "demo"} for n in "ab"}}, "colocated", 0.5),
    ],
)
def test_the_rules(machine: Machine, flags: dict[str, Any], kind: str, gpus: float) -> None:
    placement = place(load_settings(None, flags, environ={}), machine)
    assert (placement.kind, placement.gpus) == (kind, gpus)
    assert str(placement).startswith(f"{kind} (")
    assert placement.gpus_of(EncoderSettings(device="cpu")) == 0
    assert placement.gpus_of(EncoderSettings()) == gpus
    assert placement.gpus_of(DecoderSettings(gpus=0.25)) == 0.25


@pytest.mark.parametrize(
    ("machine", "flags", "named"),
    [
        (CPU, {"placement": "colocated", **TWO_ENCODERS}, "of both to 1"),
        (CPU, {"placement": "colocated", **MAY_SLEEP}, "min_replicas"),
        (CPU, {"placement": "colocated", "transport": "nixl"}, "leave transport"),
        (CPU, {"placement": "colocated", "encoder": {"device": "cpu"}}, "one device"),
        (CPU, {"placement": "split", "transport": "memory"}, "need NIXL"),
        (NO_NIXL, TWO_ENCODERS, "need NIXL"),
    ],
)
def test_what_contradicts_itself_is_refused(
    machine: Machine, flags: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        place(load_settings(None, flags, environ={}), machine)
