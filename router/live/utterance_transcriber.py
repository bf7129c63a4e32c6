"""Turns the oldest utterance of a session into text, update by update.

While an utterance grows, each step decodes its newest audio and emits the tokens that are confirmed
by it. A long utterance is cut. When an utterance has ended, its final update is decoded, all of its
text is emitted, and the utterance is removed. When a step is due is for `router.live.session`.

An update that fails is left out, since the next one covers its audio. Only the final update of an
utterance can fail the turn.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from cluster.common.errors import SplitscribeError
from cluster.common.logs import log_fields
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from router.live.interface import LiveConfig
from router.live.partial_transcript import ConfirmedToken, PartialTranscript
from router.live.policies import AttentionPeak, Policy
from router.live.schedule import MAX_UTTERANCE, PAUSE, WORD_END_MARGIN, Schedule
from router.live.session_events import SessionEvents
from router.live.timeline import AudioBuffer, Utterance, quietest, samples, seconds
from router.live.turn_detector import TurnDetector
from router.live.update_decoder import SessionParts, UpdateRequest, UpdateResult, UpdateRunner

logger = logging.getLogger(__name__)

SOFT_CUT = samples(8.0)  # a longer utterance is cut where a sentence has ended
WORD_CUT = samples(12.0)  # a longer one is cut between any two words if no sentence has ended
# An utterance of the longest length without confirmed words is cut at a quiet place after this.
HARD_CUT = samples(15.0)
# So much speech after the end of a final update's text becomes an utterance of its own.
MISSED_SPEECH = samples(1.0)


class UtteranceTranscriber:
    """Decodes the utterances of one session, one after the other."""

    def __init__(
        self,
        parts: SessionParts,
        session_id: str,
        audio: AudioBuffer,
        detector: TurnDetector,
        schedule: Schedule,
        events: SessionEvents,
        runner: UpdateRunner,
    ) -> None:
        """The parts of the session, which the caller keeps using too."""
        self._parts = parts
        self._id = session_id
        self._audio = audio
        self._detector = detector
        self._schedule = schedule
        self._events = events
        self._runner = runner
        self._partial: PartialTranscript | None = None  # of the utterance that is being decoded

    async def step(self) -> None:
        """Decode the newest audio of the oldest utterance, or finish it if it has ended."""
        utterance = self._detector.utterances[0]
        if self._partial is None or self._partial.utterance is not utterance:
            config = utterance.turn.config
            self._partial = PartialTranscript(
                utterance, self._policy(config), self._parts.tokenizer
            )
        if utterance.end is None or utterance.end - utterance.start > MAX_UTTERANCE:
            await self._update(self._partial)
        else:
            await self._finish(self._partial)

    async def _update(self, partial: PartialTranscript) -> None:
        utterance = partial.utterance
        end = min(self._schedule.newest(utterance), utterance.start + MAX_UTTERANCE)
        utterance.updated_to = end
        try:
            decoded = await self._decode(partial, end, is_final=False)
        except SplitscribeError as error:
            self._parts.observer.update_failed()
            logger.warning("an update failed: %s", error, extra=log_fields(request_id=self._id))
        else:
            if decoded is None:
                return
            self._emit_text(partial, decoded, partial.add_update(decoded, end))
            if self._cut(partial, end):
                return
        if end - utterance.start >= MAX_UTTERANCE and not utterance.turn.is_cleared:
            self._split(partial, end)

    def _cut(self, partial: PartialTranscript, end: int) -> bool:
        """Cut the beginning off a long utterance. Returns whether there was a place to cut."""
        start = partial.utterance.start
        if end - start <= SOFT_CUT:
            return False
        audio = self._audio.span(start, end)
        for segment in partial.cut(audio, anywhere=end - start > WORD_CUT):
            self._events.emit(segment)
        return partial.utterance.start > start

    def _split(self, partial: PartialTranscript, end: int) -> None:
        """Cut an utterance of the longest length where it is quietest, without confirmed words."""
        rest = partial.utterance
        known = partial.attended_to * SAMPLES_PER_POSITION
        found, _ = quietest(
            self._audio.span(rest.start, end), max(HARD_CUT, known), end - rest.start
        )
        at = min(rest.start + found, end)
        partial.last = None  # it also covers audio after the cut
        front = Utterance(rest.turn, rest.start, at, speech=rest.speech_before(at))
        rest.start = rest.updated_to = at
        rest.speech = rest.speech_after(at) or [(at, at)]
        partial.utterance = front
        self._detector.utterances.insert(0, front)

    async def _finish(self, partial: PartialTranscript) -> None:
        """Emit the rest of an utterance that has ended, and remove it from the detector's list."""
        utterance, turn = partial.utterance, partial.utterance.turn
        assert utterance.end is not None
        if utterance.speech and turn.error is None:
            try:
                decoded = await self._final_result(partial, utterance.end)
            except SplitscribeError as error:
                turn.error = error
                decoded = None
            if decoded is not None:
                self._emit_text(partial, decoded, partial.add_final(decoded))
            if not turn.is_cleared:
                for segment in partial.remaining_segments():
                    self._events.emit(segment)
        if turn.is_cleared:
            return
        utterance.updated_to = utterance.end
        rest = self._missed_speech(partial) if turn.error is None else None
        self._detector.utterances[:1] = [] if rest is None else [rest]
        self._partial = None
        if rest is None and utterance.ends_turn:
            self._events.end_turn(turn, utterance.end if turn.end is None else turn.end)

    async def _final_result(self, partial: PartialTranscript, end: int) -> UpdateResult | None:
        """The utterance's final result: that of the last update, if it covers all speech."""
        if partial.covers(partial.utterance.speech_end + WORD_END_MARGIN):
            return partial.last
        return await self._decode(partial, min(end, self._audio.end), is_final=True)

    def _missed_speech(self, partial: PartialTranscript) -> Utterance | None:
        """The speech after the end of the decoded text, if it is long, as an utterance."""
        utterance, end = partial.utterance, partial.utterance.end
        assert end is not None
        text_end = partial.text_end()
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

    async def _decode(
        self, partial: PartialTranscript, end: int, *, is_final: bool
    ) -> UpdateResult | None:
        """Decode the utterance up to sample `end`. None if overtaken, or its turn cleared."""
        utterance, runner = partial.utterance, self._runner
        turn = utterance.turn
        known = utterance.start + partial.attended_to * SAMPLES_PER_POSITION
        request = UpdateRequest(
            turn,
            pcm=self._audio.span(utterance.start, end),
            prefix_tokens=partial.prefix_tokens,
            new_audio_s=seconds(end - known),
            is_final=is_final,
            with_peaks=self._policy(turn.config).needs_peaks,
        )
        return await runner.decode(
            request,
            lambda waited_s: self._schedule.is_overtaken(
                utterance, end, waited_s, runner.overtaken, is_final=is_final
            ),
        )

    def _emit_text(
        self, partial: PartialTranscript, decoded: UpdateResult, tokens: list[ConfirmedToken]
    ) -> None:
        utterance = partial.utterance
        self._events.emit_text(
            utterance.turn, decoded.language, tokens, utterance.start, self._audio.end
        )

    def _policy(self, config: LiveConfig) -> Policy:
        policy = self._parts.policy
        if isinstance(policy, AttentionPeak) and config.delay is not None:
            return replace(policy, hold_s=self._schedule.delay_profile(config).hold_s)
        return policy
