"""What all workers and routers of one simulated cell share, and what is noted of a run."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from cluster.clock import Clock
from cluster.messages import Priority
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.planning.profile import Profile, Surface
from cluster.planning.scenario import Traffic
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


@dataclass(frozen=True, slots=True)
class Noted:
    """A decision, or something that happened to the cluster."""

    at_s: float
    what: str
    why: str


@dataclass(slots=True)
class Answers:
    """Requests of one class, as columns, in the order in which they were answered.

    audio_s and latency_s of those that got a transcript, with their arrival.
    """

    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    audio_s: array[float] = field(default_factory=lambda: array("d"))
    latency_s: array[float] = field(default_factory=lambda: array("d"))
    failed_at_s: array[float] = field(default_factory=lambda: array("d"))
    failures: dict[str, int] = field(default_factory=dict)  # by status and code


@dataclass(slots=True)
class Moment:
    """The cluster at one second: shares of 0 to 1, and counts."""

    at_s: float
    encoders: int
    decoders: int
    encoder_busy: float
    decoder_busy: float
    encoder_pages: float
    decoder_pages: float
    encoder_queue: float
    decoder_waiting: int
    pending: int


@dataclass(slots=True)
class Records:
    """All of one simulation."""

    answers: dict[Priority, Answers] = field(default_factory=dict)
    noted: list[Noted] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    retries: dict[str, int] = field(default_factory=dict)  # of windows, by reason
    n_requests: int = 0

    def answered(self, priority: Priority, at_s: float, audio_s: float, latency_s: float) -> None:
        told = self._of(priority)
        told.arrived_s.append(at_s)
        told.audio_s.append(audio_s)
        told.latency_s.append(latency_s)

    def failed(self, priority: Priority, at_s: float, reason: str) -> None:
        told = self._of(priority)
        told.failed_at_s.append(at_s)
        told.failures[reason] = told.failures.get(reason, 0) + 1

    def note(self, at_s: float, what: str, why: str) -> None:
        self.noted.append(Noted(round(at_s, 3), what, why))

    def _of(self, priority: Priority) -> Answers:
        return self.answers.setdefault(priority, Answers())
