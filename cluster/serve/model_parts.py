"""Make the transcriber of whole files and the live engine of one model.

Settings are those of `Settings.by_model`; the checkpoint may be without weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.metrics import Recorder
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.encoder_context import chosen_context
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import BUNDLED_MODEL, BUNDLED_MODEL_IS, Settings
from cluster.common.tracing import NO_TRACER, Tracer
from router.audio.pool import AudioPool
from router.http.models import ServedModel
from router.live.activity import VoiceActivity
from router.live.partial_transcript import chosen_policy
from router.live.session import LiveEngine
from router.pipeline import Pipeline
from router.pools import DecoderClient, EncoderClient
from router.speakers.live import SessionVoices, hear
from router.transcriber import RequestTranscriber


def make_transcriber(
    settings: Settings,
    checkpoint: Checkpoint,
    audio: AudioPool,
    encoders: EncoderClient,
    decoders: DecoderClient,
    recorder: Recorder | None = None,
    **options: Any,
) -> RequestTranscriber:
    """audio: shared by all models. options: of `RequestTranscriber`."""
    return RequestTranscriber(
        audio,
        encoders,
        decoders,
        WhisperTokenizer.from_checkpoint(checkpoint),
        settings.router,
        recorder,
        dims=checkpoint.dims,
        context_for=_context_for(settings, checkpoint),
        **{"reuses_kv": settings.encoder.cache, **options},
    )


def make_live_engine(
    settings: Settings,
    checkpoint: Checkpoint,
    encoders: EncoderClient,
    decoders: DecoderClient,
    activity: VoiceActivity,
    recorder: Recorder,
    tracer: Tracer = NO_TRACER,
    clock: Clock = SYSTEM_CLOCK,
    audio: AudioPool | None = None,
) -> LiveEngine:
    """activity: shared by all engines; the caller closes it after them.

    audio: tells speakers apart if it has a network for it.
    """
    dims = checkpoint.dims
    voices = None
    if audio is not None and audio.tells_voices_apart:
        voices = partial(SessionVoices, partial(hear, audio), audio.threshold)
    return LiveEngine(
        # Audio that grows never comes again, so its KV is not kept.
        Pipeline(encoders, decoders, settings.router, recorder, tracer, clock, reuses_kv=False),
        WhisperTokenizer.from_checkpoint(checkpoint),
        settings.router.live,
        policy=chosen_policy(settings.router.live.policy, dims),
        n_text_ctx=dims.n_text_ctx,
        activity=activity,
        context_for=_context_for(settings, checkpoint),
        voices=voices,
        recorder=recorder,
        tracer=tracer,
        clock=clock,
    )


def _context_for(settings: Settings, checkpoint: Checkpoint) -> Callable[[int], int] | None:
    """Return a function from mel frames of audio to encoder positions; None: always all."""
    trimmed = chosen_context(checkpoint, settings.encoder)
    if trimmed is None:
        return None
    return partial(trimmed.positions_for, n_audio_ctx=checkpoint.dims.n_audio_ctx)


TOY = f"The bundled model is {BUNDLED_MODEL_IS}. For other recordings serve another, such as turbo."


def served_model(
    settings: Settings, name: str, transcriber: RequestTranscriber, live: LiveEngine | None = None
) -> ServedModel:
    own = settings.by_model()[name]
    return ServedModel(
        names=own.served_model_names,
        languages=transcriber.tokenizer.languages,
        transcriber=transcriber,
        aliases=settings.aliases_of(name),
        live=live,
        description=TOY if own.model == BUNDLED_MODEL else None,
    )
