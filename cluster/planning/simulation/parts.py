"""What all workers and routers of one simulated cell share."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from cluster.clock import Clock
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.planning.profile.curves import Surface
from cluster.planning.profile.model import Profile
from cluster.planning.scenario.arrivals import Traffic
from cluster.planning.simulation.transfer import Links
from cluster.settings import Settings


@dataclass(slots=True)
class CellParts:
    """Handed to whoever is built.

    settings: with every `auto` resolved. random: all chance of the cell, from one seed.
    traffic: the requests that are under way, by which a decoder knows how long a text is.
    """

    profile: Profile
    settings: Settings
    clock: Clock
    random: Random
    links: Links
    tokenizer: WhisperTokenizer
    traffic: Traffic
    encode_surface: Surface
    step_surface: Surface
    prefill_surface: Surface


def as_checkpoint(profile: Profile) -> Any:
    """What checks of layouts ask of a checkpoint: its dimensions and its fingerprint."""
    shape = profile.shape
    dims = SimpleNamespace(
        n_audio_ctx=shape.n_audio_ctx,
        n_audio_state=shape.n_audio_state,
        n_text_ctx=shape.n_text_ctx,
        n_text_state=shape.n_text_state,
        n_text_head=shape.n_text_head,
        n_text_layer=shape.n_text_layer,
        text_head_dim=shape.n_text_state // shape.n_text_head,
    )
    return SimpleNamespace(dims=dims, fingerprint=profile.model)


def surfaces(profile: Profile) -> tuple[Surface, Surface, Surface]:
    """Seconds of an encoder's batch, of a decode step, and of prompts."""
    decoder = profile.decoder
    return (
        Surface((p.batch, p.positions, p.seconds) for p in profile.encoder.points),
        Surface((p.rows, p.positions, p.seconds) for p in decoder.steps),
        Surface((p.rows, p.positions, p.seconds) for p in decoder.prefills),
    )


def settings_for(profile: Profile, asked: Settings) -> Settings:
    """`asked` with sizes that are left open filled in as the profile's device has them."""
    encoder, decoder = asked.encoder, asked.decoder
    filled_encoder = {
        "max_batch": encoder.max_batch or profile.encoder.max_batch,
        "export_windows": encoder.export_windows or profile.encoder.export_windows,
    }
    filled_decoder = {
        "max_batch": decoder.max_batch or profile.decoder.max_batch,
        "kv_windows": decoder.kv_windows or profile.decoder.kv_windows,
    }
    return asked.model_copy(
        update={
            "encoder": encoder.model_copy(update=filled_encoder),
            "decoder": decoder.model_copy(update=filled_decoder),
        }
    )
