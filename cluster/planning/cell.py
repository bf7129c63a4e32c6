"""What all workers and routers of one simulated cell share."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.encoder_context import UNTUNED_MAX_CONTENT_S, UNTUNED_SLACK
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import BUNDLED_MODEL, Settings
from cluster.planning.devices import Links
from cluster.planning.profile import LinkProfile, Profile
from cluster.planning.report import Outcome
from cluster.planning.scenario import Scenario
from cluster.planning.virtual_time import virtual_clock


class Cell:
    """settings: with every `auto` resolved. exporters: the encoders, by agent."""

    def __init__(self, scenario: Scenario, profile: Profile, chance: Random) -> None:
        cluster, between = scenario.cluster, profile.handoff
        if cluster.link_gbit_per_s is not None:
            rate = cluster.link_gbit_per_s * 1e9 / 8
            between = LinkProfile(
                transport="link", latency_s=cluster.link_latency_s, bytes_per_s=rate
            )
        bundled = open_checkpoint(BUNDLED_MODEL, weights=False)
        self.profile, self.random, self.clock = profile, chance, virtual_clock(chance)
        self.loop = asyncio.get_running_loop()
        self.settings = _resolved(scenario.settings, profile)
        self.lengths = scenario.load.lengths
        self.links = Links(profile.handoff, between)
        self.tokenizer = WhisperTokenizer.from_checkpoint(bundled)
        self.checkpoint = replace(bundled, dims=replace(bundled.dims, **profile.shape.model_dump()))
        self.exporters: dict[str, Any] = {}
        self.outcome = Outcome(scenario, profile)


def _resolved(settings: Settings, profile: Profile) -> Settings:
    """Sizes that are left open, as the profile's device has them.

    The context of windows, too: what the bundled checkpoint says of its own holds for no other.
    """
    asked, decoder = settings.encoder, settings.decoder
    slack, longest_s = asked.context_slack, asked.context_max_s
    encoder = {
        "max_batch": asked.max_batch or profile.encoder.max_batch,
        "export_windows": asked.export_windows or profile.encoder.export_windows,
        "context": "full" if asked.context == "auto" else asked.context,
        "context_slack": UNTUNED_SLACK if slack is None else slack,
        "context_max_s": UNTUNED_MAX_CONTENT_S if longest_s is None else longest_s,
    }
    sizes = {
        "max_batch": decoder.max_batch or profile.decoder.max_batch,
        "kv_windows": decoder.kv_windows or profile.decoder.kv_windows,
    }
    return settings.model_copy(
        update={
            "encoder": asked.model_copy(update=encoder),
            "decoder": decoder.model_copy(update=sizes),
        }
    )
