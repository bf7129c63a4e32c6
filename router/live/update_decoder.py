"""Updates: each takes the audio of an utterance through both pools, as one window like any other.

`UpdateDecoder` makes the window and its decode options from what the session knows, and a
`Hypothesis` from the result. `UpdateRunner` runs the updates of one session, one at a time, cancels
one that is no longer worth waiting for, and records how long updates take. Neither knows policies,
or when updates are due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.messages import DecodeOptions, DecodeResult, Pcm, QualityGates
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.model.text.quality import is_silence, repeats_itself
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.tracing import NO_TRACER, Tracer
from router.api.params import LADDER, PARALLEL_GATES
from router.interface import RequestContext
from router.live.activity import VoiceActivity
from router.live.observer import LiveObserver
from router.live.policies import Hypothesis, Policy
from router.live.schedule import DelayProfile, Pace
from router.live.timeline import Turn
from router.pipeline import Pipeline, RequestRun, WindowAudio
from router.text_context import TextContext

UPDATE_TIME_S = 30.0  # deadline of an update
FINAL_TIME_S = 60.0  # deadline of a final update, which no other update follows
# An update may sample so many tokens, and so many more for each second of new audio.
LEAST_TOKENS = 24
TOKENS_PER_S = 16
START_TOKENS = 5  # tokens before the prefix: <|startofprev|> and the start sequence
LEAST_ROOM = 64  # tokens that a long prompt leaves for new text
# An update fails for repetition only: its audio may end within a word, which lowers avg_logprob.
UPDATE_GATES = QualityGates(avg_logprob=None, no_speech_prob=None)


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """What one update decodes.

    pcm: the utterance's audio so far, int16 [n_samples].
    prefix_tokens: the confirmed tokens, with which the text is forced to begin.
    new_audio_s: seconds of audio after the last confirmed token.
    is_final: no more audio follows, so all quality gates and temperatures are used.
    with_peaks: ask for attention peaks.
    """

    turn: Turn
    pcm: Pcm
    prefix_tokens: tuple[int, ...]
    new_audio_s: float
    is_final: bool
    with_peaks: bool


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of one update.

    is_trusted: the audio holds speech, and the text does not repeat itself.
    encode_s: seconds that the encoder took.
    """

    hypothesis: Hypothesis
    language: str
    is_trusted: bool
    encode_s: float


class UpdateDecoder:
    """Decodes the updates of all sessions of one model."""

    def __init__(
        self,
        pipeline: Pipeline,
        tokenizer: WhisperTokenizer,
        n_text_ctx: int,
        context_for: Callable[[int], int] | None,
        clock: Clock = SYSTEM_CLOCK,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """context_for: as in `WindowAudio.of_samples`. tracer: makes a span for each update."""
        self._tracer = tracer
        self._pipeline = pipeline
        self._tokenizer = tokenizer
        self._n_text_ctx = n_text_ctx
        self._context_for = context_for
        self._clock = clock

    async def decode(
        self, request: UpdateRequest, *, session_id: str, number: int, owner: bytes
    ) -> UpdateResult:
        """Take one update through both pools. Cancelling the call cancels it in queues and workers.

        Args:
            number: number of the update within the session, from 1 on.
            owner: whose audio it is, as in `RequestContext`.

        Raises:
            SplitscribeError: as `Pipeline.decode`.
        """
        turn, time_s = request.turn, FINAL_TIME_S if request.is_final else UPDATE_TIME_S
        context = RequestContext.unlimited(session_id, time_s, self._clock)
        context.owner, context.priority = owner, "live"
        with self._tracer.span(
            "live update",
            turn.span.traceparent,
            request_id=session_id,
            turn=turn.number,
            update=number,
            is_final=request.is_final,
        ) as span:
            context.span = span
            run = RequestRun(context)
            audio = WindowAudio.of_samples(number, request.pcm, self._context_for)
            options = self._options(request)
            result = await self._pipeline.decode(run, audio, options)
            allowed = turn.config.languages
            if options.language is None and allowed and result.language not in allowed:
                options = replace(options, language=allowed[0])
                result = await self._pipeline.decode(run, audio, options)
        return UpdateResult(
            Hypothesis(
                result.tokens,
                result.token_logprobs,
                result.peak_positions or (),
                request.pcm.shape[0] // SAMPLES_PER_POSITION,
            ),
            result.language,
            self._is_trusted(result, request.prefix_tokens),
            run.encode_s,
        )

    def _options(self, request: UpdateRequest) -> DecodeOptions:
        config = request.turn.config
        context = TextContext(
            self._tokenizer,
            self._n_text_ctx,
            prompt=config.prompt,
            hotwords=", ".join(config.keywords),
        )
        prompt = context.prompt_tokens()
        room = self._n_text_ctx - START_TOKENS - len(request.prefix_tokens)
        prompt = prompt[len(prompt) - max(0, min(len(prompt), room - LEAST_ROOM)) :]
        room = min(room - len(prompt), self._n_text_ctx // 2)
        wanted = (
            room if request.is_final else LEAST_TOKENS + round(TOKENS_PER_S * request.new_audio_s)
        )
        return DecodeOptions(
            language=self._language(request.turn),
            timestamps=True,
            prompt_tokens=prompt,
            temperatures=LADDER if request.is_final else (0.0,),
            max_new_tokens=max(1, min(room, wanted)),
            gates=PARALLEL_GATES if request.is_final else UPDATE_GATES,
            prefix_tokens=request.prefix_tokens,
            peaks=request.with_peaks,
        )

    def _language(self, turn: Turn) -> str | None:
        if not self._tokenizer.is_multilingual:
            return "en"
        if turn.config.language is None and len(turn.config.languages) == 1:
            return turn.config.languages[0]
        return turn.language or turn.config.language

    def _is_trusted(self, result: DecodeResult, prefix_tokens: Sequence[int]) -> bool:
        gates = PARALLEL_GATES
        if repeats_itself(gates, result.compression_ratio):
            return False
        return bool(prefix_tokens) or not is_silence(
            gates, result.avg_logprob, result.no_speech_prob
        )


class UpdateRunner:
    """Runs a session's updates.

    is_running: whether one is being decoded. overtaken: how many were cancelled in a row.
    """

    def __init__(
        self, parts: SessionParts, session_id: str, owner: bytes, changed: asyncio.Event
    ) -> None:
        """changed: set by others when `is_overtaken` may have changed; it is cleared here."""
        self._parts = parts
        self._session_id = session_id
        self._owner = owner
        self._changed = changed
        self._n = 0
        self.is_running = False
        self.overtaken = 0

    async def decode(
        self, request: UpdateRequest, is_overtaken: Callable[[float], bool]
    ) -> UpdateResult | None:
        """Decode one update. None if it was overtaken, or its turn was cleared.

        Args:
            is_overtaken: whether to cancel it after so many seconds.

        Raises:
            SplitscribeError: as `UpdateDecoder.decode`.
        """
        parts, clock = self._parts, self._parts.clock
        began_s = clock.monotonic()
        self._n += 1
        updating = asyncio.ensure_future(
            parts.update_decoder.decode(
                request, session_id=self._session_id, number=self._n, owner=self._owner
            )
        )
        self.is_running = True
        try:
            while not updating.done():
                waited_s = clock.monotonic() - began_s
                if is_overtaken(waited_s):
                    self.overtaken += 1
                    parts.observer.update_overtaken()
                    parts.pace.record(waited_s)
                    return None
                await self._change_or(updating)
            decoded = await updating
        finally:
            self.is_running = False
            if not updating.done():
                updating.cancel()
                await asyncio.wait([updating])
        took_s = clock.monotonic() - began_s
        self.overtaken = 0
        parts.pace.record(took_s)
        parts.observer.update_answered(took_s, decoded.encode_s, parts.pace.hop_s)
        return None if request.turn.is_cleared else decoded

    async def _change_or(self, task: asyncio.Future[UpdateResult]) -> None:
        """Wait until the task is done, or `changed` is set."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            both: set[asyncio.Future[Any]] = {task, changed}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What all live sessions of an engine share.

    delay: for sessions that ask for none. tracer: begins a trace for each turn.
    """

    activity: VoiceActivity
    update_decoder: UpdateDecoder
    tokenizer: WhisperTokenizer
    policy: Policy
    pace: Pace
    observer: LiveObserver
    clock: Clock
    delay: DelayProfile
    tracer: Tracer = NO_TRACER
