"""Turns the oldest utterance of a session into text, update by update.

While an utterance grows, each step decodes its newest audio and emits the confirmed tokens. When it
has ended, its final update is decoded, the rest of its text is emitted, and it is removed. Only a
failed final update fails the turn, since each other update is repeated by the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.errors import SplitscribeError, WindowRefusedError
from cluster.common.logs import log_fields
from cluster.common.messages import DecodeOptions, DecodeResult, Pcm, QualityGates
from cluster.common.metrics import Recorder
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.model.text.quality import is_silence, repeats_itself
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import LiveSettings
from cluster.common.tracing import NO_TRACER, Tracer
from router.api.params import LADDER, PARALLEL_GATES
from router.audio.windows import samples
from router.interface import RequestContext
from router.live.activity import VoiceActivity
from router.live.interface import LiveConfig, TurnSegment, wants_speakers
from router.live.partial_transcript import AttentionPeak, Hypothesis, PartialTranscript, Policy
from router.live.schedule import (
    MAX_UTTERANCE,
    PAUSE,
    WORD_END_MARGIN,
    Pace,
    Schedule,
    delay_profile,
)
from router.live.turn_detector import TurnDetector
from router.live.turns import AudioBuffer, SessionEvents, Token, Turn, Utterance, quietest, seconds
from router.pipeline import Pipeline, RequestRun, WindowAudio
from router.seeking import TextContext
from router.speakers.live import SessionVoices

logger = logging.getLogger(__name__)

SOFT_CUT = samples(8.0)  # a longer utterance is cut where a sentence has ended
WORD_CUT = samples(12.0)  # a longer one is cut between any two words if no sentence has ended
# An utterance that reaches the longest length without confirmed words is cut after this.
HARD_CUT = samples(15.0)
# Speech of this length after the end of a final update's text becomes another utterance.
MISSED_SPEECH = samples(1.0)
UPDATE_TIME_S = 30.0  # deadline of an update
FINAL_TIME_S = 60.0  # deadline of a final update
# Token limit of an update: a constant, and more for each second of new audio.
LEAST_TOKENS = 24
TOKENS_PER_S = 16
MOST_FINALS = 4  # final updates of one utterance
START_TOKENS = 5  # <|startofprev|> and the start sequence
LEAST_ROOM = 64  # tokens that a long prompt leaves for new text
# An update fails for repetition only: audio that ends within a word lowers avg_logprob.
UPDATE_GATES = QualityGates(avg_logprob=None, no_speech_prob=None)


@dataclass(eq=False)
class LiveEngineParts:
    """The objects that all live sessions of one model share."""

    pipeline: Pipeline  # without reuse of KV, since no audio comes twice
    tokenizer: WhisperTokenizer
    settings: LiveSettings
    _: KW_ONLY
    policy: Policy
    n_text_ctx: int
    activity: VoiceActivity  # shared by all engines and closed by its maker
    recorder: Recorder
    context_for: Callable[[int], int] | None = None  # see `WindowAudio.of_samples`
    voices: Callable[[], SessionVoices] | None = None  # None: no speaker model
    tracer: Tracer = NO_TRACER
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.pace = Pace(self.settings.min_hop_s, self.settings.max_hop_s, self.clock)


class UtteranceTranscriber:
    """changed: set when an update may be due, or the running one may be overtaken."""

    def __init__(
        self,
        engine: LiveEngineParts,
        session_id: str,
        owner: bytes,
        audio: AudioBuffer,
        detector: TurnDetector,
        schedule: Schedule,
        events: SessionEvents,
    ) -> None:
        self.changed = asyncio.Event()
        self._engine = engine
        self._id = session_id
        self._owner = owner
        self._audio = audio
        self._detector = detector
        self._schedule = schedule
        self._events = events
        self._partial: PartialTranscript | None = None  # of the oldest utterance
        self._voices = None if engine.voices is None else engine.voices()
        self._n_updates = 0
        self._n_overtaken = 0  # successive overtaken updates

    async def step(self) -> None:
        """Decode the newest audio of the oldest utterance, or finish it if it has ended."""
        utterance = self._detector.utterances[0]
        if self._partial is None or self._partial.utterance is not utterance:
            policy = self._policy(utterance.turn.config)
            self._partial = PartialTranscript(utterance, policy, self._engine.tokenizer)
        if utterance.end is None or utterance.end - utterance.start > MAX_UTTERANCE:
            await self._update(self._partial)
        else:
            await self._finish(self._partial, utterance.end)

    async def _update(self, partial: PartialTranscript) -> None:
        utterance = partial.utterance
        end = min(self._schedule.newest(utterance), utterance.start + MAX_UTTERANCE)
        utterance.updated_to = end
        try:
            decoded = await self._decode(partial, end, is_final=False)
        except WindowRefusedError:
            raise  # the next update has the same audio and would end workers, too
        except SplitscribeError as error:
            self._count_update("failed")
            logger.warning("an update failed: %s", error, extra=log_fields(request_id=self._id))
        else:
            if decoded is None:
                return
            fresh = partial.add_update(decoded, end)
            self._events.emit_text(utterance, decoded.language, fresh, self._audio.end)
            if await self._cut(partial, end):
                return
        if end - utterance.start >= MAX_UTTERANCE and not utterance.turn.is_cleared:
            self._split(partial, end)

    async def _cut(self, partial: PartialTranscript, end: int) -> bool:
        """Cut a long utterance, or one with many tokens. Return whether it was cut."""
        start = partial.utterance.start
        is_dense = len(partial.prefix_tokens) > self._engine.n_text_ctx // 4
        if end - start <= SOFT_CUT and not is_dense:
            return False
        audio = self._audio.span(start, end)
        segments = partial.cut(audio, anywhere=is_dense or end - start > WORD_CUT)
        await self._emit_segments(partial.utterance.turn, segments)
        return partial.utterance.start > start

    def _split(self, partial: PartialTranscript, end: int) -> None:
        """Cut an utterance of the longest length at its quietest place."""
        rest = partial.utterance
        known = partial.attended_to * SAMPLES_PER_POSITION
        found, _ = quietest(
            self._audio.span(rest.start, end), max(HARD_CUT, known), end - rest.start
        )
        at = min(rest.start + found, end)
        partial.last = None  # it covers audio after the cut
        front = Utterance(rest.turn, rest.start, at, speech=rest.speech_before(at))
        rest.start = rest.updated_to = at
        rest.speech = rest.speech_after(at) or [(at, at)]
        partial.utterance = front
        self._detector.utterances.insert(0, front)

    async def _finish(self, partial: PartialTranscript, end: int) -> None:
        utterance, turn = partial.utterance, partial.utterance.turn
        if utterance.speech and turn.error is None:
            try:
                await self._complete(partial, end)
            except SplitscribeError as error:
                turn.error = error
            if not turn.is_cleared:
                await self._emit_segments(turn, partial.remaining_segments())
        if turn.is_cleared:
            return
        utterance.updated_to = end
        rest = self._missed_speech(partial, end) if turn.error is None else None
        self._detector.utterances[:1] = [] if rest is None else [rest]
        self._partial = None
        if rest is None and utterance.ends_turn:
            self._events.end_turn(turn, end if turn.end is None else turn.end)

    async def _complete(self, partial: PartialTranscript, end: int) -> None:
        """Emit the remaining text. A decode that reaches its token limit is followed by another."""
        covers = partial.covers(partial.utterance.speech_end + WORD_END_MARGIN)
        decoded = partial.last if covers else None
        for _ in range(MOST_FINALS):
            if decoded is None:
                decoded = await self._decode(partial, min(end, self._audio.end), is_final=True)
            if decoded is None:
                return
            fresh = partial.add_final(decoded)
            self._events.emit_text(partial.utterance, decoded.language, fresh, self._audio.end)
            if not (decoded.is_cut and fresh):
                return
            await self._cut(partial, end)
            decoded = None

    def _missed_speech(self, partial: PartialTranscript, end: int) -> Utterance | None:
        """Return the speech after the decoded text as an utterance, if it is long enough."""
        utterance, text_end = partial.utterance, partial.text_end()
        speech = utterance.speech_after(text_end)
        if (
            text_end <= utterance.start
            or sum(last - first for first, last in speech) < MISSED_SPEECH
        ):
            return None
        start = max(text_end, speech[0][0] - PAUSE)
        if start <= utterance.start:
            return None
        return Utterance(utterance.turn, start, end, utterance.ends_turn, speech)

    async def _emit_segments(self, turn: Turn, segments: list[TurnSegment]) -> None:
        voices = self._voices if wants_speakers(turn.config) else None
        at, held = turn.start, self._audio.held  # copied before the await, which may drop audio
        pieces = [held(at + samples(one.start_s), at + samples(one.end_s)) for one in segments]
        speakers = [""] * len(pieces) if voices is None else await voices.speakers_of(pieces)
        if turn.is_cleared:  # during the await
            return
        for one, speaker in zip(segments, speakers, strict=True):
            self._events.emit(replace(one, speaker=speaker))

    def _policy(self, config: LiveConfig) -> Policy:
        policy = self._engine.policy
        if isinstance(policy, AttentionPeak) and config.delay is not None:
            return replace(policy, hold_s=delay_profile(config).hold_s)
        return policy

    def _count_update(self, outcome: str) -> None:
        self._engine.recorder.add("splitscribe_live_updates_total", outcome=outcome)

    # -- one update --------------------------------------------------------------------------

    async def _decode(
        self, partial: PartialTranscript, end: int, *, is_final: bool
    ) -> Hypothesis | None:
        """Decode up to sample `end`. Return None if it is overtaken or its turn is cleared."""
        engine, utterance, clock = self._engine, partial.utterance, self._engine.clock
        began_s = clock.monotonic()
        self._n_updates += 1
        pcm = self._audio.span(utterance.start, end)
        options = self._options(partial, end, is_final)
        updating = asyncio.ensure_future(self._in_pools(utterance.turn, pcm, options, is_final))
        try:
            while not updating.done():
                waited_s = clock.monotonic() - began_s
                if self._schedule.is_overtaken(
                    utterance, end, waited_s, self._n_overtaken, is_final=is_final
                ):
                    self._n_overtaken += 1
                    self._count_update("overtaken")
                    engine.pace.record(waited_s)
                    return None
                await self._change_or(updating)
            result = await updating
        finally:
            if not updating.done():
                updating.cancel()
                await asyncio.wait([updating])
        took_s = clock.monotonic() - began_s
        self._n_overtaken = 0
        engine.pace.record(took_s)
        self._count_update("answered")
        engine.recorder.observe("splitscribe_live_update_seconds", took_s)
        engine.recorder.set("splitscribe_live_hop_seconds", engine.pace.hop_s)
        if utterance.turn.is_cleared:
            return None
        begin = engine.tokenizer.special.timestamp_begin
        peaks = result.peak_positions or (None,) * len(result.tokens)
        tokens = tuple(
            Token(token, logprob, peak if token < begin else None)
            for token, logprob, peak in zip(
                result.tokens, result.token_logprobs, peaks, strict=True
            )
        )
        return Hypothesis(
            tokens,
            pcm.shape[0] // SAMPLES_PER_POSITION,
            result.language,
            is_trusted(result, continues=bool(options.prefix_tokens), is_final=is_final),
            is_cut=result.finish_reason == "length"
            and not repeats_itself(PARALLEL_GATES, result.compression_ratio),
        )

    async def _change_or(self, updating: asyncio.Future[DecodeResult]) -> None:
        changed = asyncio.ensure_future(self.changed.wait())
        both: set[asyncio.Future[Any]] = {updating, changed}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self.changed.clear()

    async def _in_pools(
        self, turn: Turn, pcm: Pcm, options: DecodeOptions, is_final: bool
    ) -> DecodeResult:
        engine, number = self._engine, self._n_updates
        time_s = FINAL_TIME_S if is_final else UPDATE_TIME_S
        context = RequestContext.unlimited(self._id, time_s, engine.clock)
        context.owner, context.priority = self._owner, "live"
        with engine.tracer.span(
            "live update",
            turn.span.traceparent,
            request_id=self._id,
            turn=turn.number,
            update=number,
            is_final=is_final,
        ) as span:
            context.span = span
            run = RequestRun(context)
            audio = WindowAudio.of_samples(number, pcm, engine.context_for)
            return await engine.pipeline.decode(run, audio, options)

    def _options(self, partial: PartialTranscript, end: int, is_final: bool) -> DecodeOptions:
        engine, utterance = self._engine, partial.utterance
        config, prefix = utterance.turn.config, partial.prefix_tokens
        context = TextContext(
            engine.tokenizer,
            engine.n_text_ctx,
            prompt=config.prompt,
            hotwords=", ".join(config.keywords),
        )
        prompt = context.prompt_tokens()
        room = engine.n_text_ctx - START_TOKENS - len(prefix)
        prompt = prompt[len(prompt) - max(0, min(len(prompt), room - LEAST_ROOM)) :]
        room = min(room - len(prompt), engine.n_text_ctx // 2)
        known = utterance.start + partial.attended_to * SAMPLES_PER_POSITION
        wanted = room if is_final else LEAST_TOKENS + round(TOKENS_PER_S * seconds(end - known))
        return DecodeOptions(
            language=self._language(utterance.turn),
            languages=config.languages,
            timestamps=True,
            prompt_tokens=prompt,
            temperatures=LADDER if is_final else (0.0,),
            max_new_tokens=max(1, min(room, wanted)),
            gates=PARALLEL_GATES if is_final else UPDATE_GATES,
            prefix_tokens=prefix,
            peaks=isinstance(engine.policy, AttentionPeak),
        )

    def _language(self, turn: Turn) -> str | None:
        if not self._engine.tokenizer.is_multilingual:
            return "en"
        if turn.config.language is None and len(turn.config.languages) == 1:
            return turn.config.languages[0]
        return turn.language or turn.config.language


def is_trusted(result: DecodeResult, *, continues: bool, is_final: bool) -> bool:
    """Return whether the text is neither silence nor a repetition. continues: text precedes it."""
    gates = PARALLEL_GATES
    # A final text may repeat itself, as people do: no other temperature gave a better one.
    if not is_final and repeats_itself(gates, result.compression_ratio):
        return False
    return continues or not is_silence(gates, result.avg_logprob, result.no_speech_prob)
