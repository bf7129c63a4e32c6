"""Makes what transcribes for one model: the transcriber of whole files, and the live engine.

Settings are those of the model as if it were alone; its checkpoint may be without weights.
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
    """The transcriber of one model. `audio` is of all models; options: of `RequestTranscriber`."""
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
    """The engine of one model. activity: of all engines; the caller closes it, after the engine.

    audio: what tells speakers apart, if it can.
    """
    dims = checkpoint.dims
    voices = None
    if audio is not None and audio.tells_voices_apart:
        voices = partial(SessionVoices, partial(hear, audio), audio.threshold)
    return LiveEngine(
        # Growing audio never comes again, so that its KV is not kept.
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
    """From mel frames of a window's audio to its context; None where each has the full one."""
    trimmed = chosen_context(checkpoint, settings.encoder)
    if trimmed is None:
        return None
    return partial(trimmed.positions_for, n_audio_ctx=checkpoint.dims.n_audio_ctx)


TOY = f"The bundled model is {BUNDLED_MODEL_IS}. For other recordings serve another, such as turbo."


def served_model(
    settings: Settings, name: str, transcriber: RequestTranscriber, live: LiveEngine | None = None
) -> ServedModel:
    """The model called `name` in `settings.by_model()`: what clients may call it, and more."""
    own = settings.by_model()[name]
    return ServedModel(
        names=own.served_model_names,
        languages=transcriber.tokenizer.languages,
        transcriber=transcriber,
        aliases=settings.aliases_of(name),
        live=live,
        description=TOY if own.model == BUNDLED_MODEL else None,
    )
