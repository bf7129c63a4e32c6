"""One live session: audio in, text out as it becomes certain.

The listener says which audio belongs together; this module keeps the text of each stretch up to
date. One update runs at a time: the oldest stretch is decoded behind the tokens that are certain,
the policy says what else is, and that is told. A stretch that was cut is decoded to its end, all of
it is told, and the next one follows. Everything is driven by audio, so that nothing here waits for
a clock: audio that comes faster than real time is decoded as fast as the pools can.

What fails costs an update; only the last decode of a stretch can fail its turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster.clock import Clock
from cluster.errors import SplitscribeError, WorkerError
from cluster.logs import log_fields
from cluster.messages import Pcm
from cluster.model.encoder_context import SAMPLES_PER_POSITION
from cluster.model.text.tokenizer import WhisperTokenizer
from router.live.activity import VoiceActivity
from router.live.draft import Certain, Draft
from router.live.interface import (
    LiveConfig,
    LiveEvent,
    TurnCompleted,
    TurnFailed,
)
from router.live.listener import Listener
from router.live.observer import LiveObserver
from router.live.pace import PATIENCE, Pace, Patience
from router.live.policies import AttentionPeak, Policy
from router.live.text import TurnText, ends_sentence
from router.live.timeline import AudioBuffer, Stretch, Turn, samples, seconds
from router.live.updates import Decoded, Updates, Work

logger = logging.getLogger(__name__)

PAUSE = samples(0.25)  # of silence behind speech: what is decoded now may be the stretch's end
COVERED = samples(0.15)  # audio behind the last speech that shows that its last word is over
SOFT_CUT = samples(8.0)  # a stretch that is longer is cut where a sentence ended
WORD_CUT = samples(12.0)  # a stretch without such a place is cut between any two words
LONGEST = samples(20.0)  # audio of one update; encoders take 30 s
AHEAD = samples(0.25)  # audio that is decoded before its voice activity is known
UNHEARD = samples(1.0)  # speech behind the text of a last decode that is decoded by itself
ALLOWANCE = 2.0  # hops that an update may take before the next one overtakes it


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What all sessions of an engine share."""

    activity: VoiceActivity
    updates: Updates
    tokenizer: WhisperTokenizer
    policy: Policy
    pace: Pace
    observer: LiveObserver
    clock: Clock
    delay: Patience


class Session:
    """Implements `router.live.interface.LiveSession`."""

    def __init__(
        self,
        parts: SessionParts,
        config: LiveConfig,
        *,
        session_id: str,
        owner: bytes = b"",
        on_end: Callable[[Session], None] = lambda session: None,
    ) -> None:
        """on_end: called once when nothing more is told."""
        self._parts = parts
        self._id = session_id
        self._owner = owner
        self._on_end = on_end
        self._audio = AudioBuffer()
        self._listener = Listener(config, self._make_turn, self._tell, self._is_finished)
        self._track = parts.activity.track(self._heard)
        self._told: asyncio.Queue[LiveEvent | None] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._is_draining = False
        self._is_closed = False
        self._n_updates = 0
        self._is_decoding = False
        self._overtaken = 0  # updates in a row
        self._draft: Draft | None = None  # of the stretch that is decoded
        self._working = asyncio.get_running_loop().create_task(self._work())

    # -- LiveSession -------------------------------------------------------------------------

    def configure(self, config: LiveConfig) -> None:
        self._listener.configure(config)
        self._changed.set()

    def append(self, pcm: Pcm) -> None:
        if self._is_closed or self._is_draining or not pcm.shape[0]:
            return
        self._audio.append(pcm)
        self._listener.appended(int(pcm.shape[0]))
        self._parts.activity.feed(self._track, pcm)

    def commit(self) -> int | None:
        if self._is_closed or self._is_draining:
            return None
        turn = self._listener.commit()
        self._changed.set()
        return None if turn is None else turn.number

    def clear(self) -> None:
        if self._is_closed:
            return
        if (turn := self._listener.clear()) is not None:
            self._complete(turn, self._audio.end)
        self._changed.set()

    @property
    def unsent_s(self) -> float:
        stretches = self._listener.stretches
        settled = stretches[0].seen_to if stretches else self._listener.heard_to
        return seconds(max(0, self._audio.end - settled))

    async def events(self) -> AsyncIterator[LiveEvent]:
        while (event := await self._told.get()) is not None:
            yield event

    async def drain(self) -> None:
        self._is_draining = True
        self._finish_draining()
        self._changed.set()
        await self._over.wait()

    async def close(self) -> None:
        self._working.cancel()
        await asyncio.wait([self._working])
        self._end()

    @property
    def is_behind(self) -> bool:
        """Whether audio that came is still on its way to text."""
        return self._listener.is_waiting or self._is_decoding or self._is_due()

    # -- what the listener asks and tells ------------------------------------------------------

    def _make_turn(self, number: int, start: int, config: LiveConfig) -> Turn:
        text = TurnText(self._parts.tokenizer, logprobs=config.logprobs)
        return Turn(number, start, config, text, cut_at=start, spoken_to=start)

    def _tell(self, event: LiveEvent) -> None:
        if not self._is_closed:
            self._told.put_nowait(event)

    def _is_finished(self, turn: Turn) -> bool:
        """Whether a turn's text ends a sentence, with all its audio decoded."""
        is_known = all(stretch.turn is not turn for stretch in self._listener.stretches)
        return is_known and ends_sentence(turn.text.told)

    def _heard(self, probabilities: object) -> None:
        self._listener.heard(probabilities)  # type: ignore[arg-type]
        self._finish_draining()
        self._audio.drop_before(self._listener.needed_from)
        self._changed.set()

    def _finish_draining(self) -> None:
        if self._is_draining and not self._listener.is_waiting:
            self._listener.commit()

    # -- from stretches to text ----------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while not self._is_done:
                if self._is_due():
                    await self._step()
                else:
                    await self._changed.wait()
                    self._changed.clear()
        except Exception:
            logger.exception("a live session failed", extra=log_fields(request_id=self._id))
            self._fail_all()
        finally:
            self._end()

    @property
    def _is_done(self) -> bool:
        listener = self._listener
        is_heard = not listener.is_waiting and not listener.pending
        return self._is_draining and is_heard and not listener.stretches

    def _is_due(self) -> bool:
        """Whether there is something to decode, or to tell, now."""
        if not self._listener.stretches:
            return False
        stretch = self._listener.stretches[0]
        if stretch.end is not None:
            return True
        spoken_to = stretch.speech_end
        if self._listener.heard_to - spoken_to >= PAUSE:
            return stretch.seen_to < spoken_to + COVERED
        hop_s = self._parts.pace.hop_for(self._patience(stretch.turn.config))
        newest = self._newest(stretch)
        if newest - stretch.start >= LONGEST:
            return True
        return newest - max(stretch.seen_to, stretch.speech[0][0]) >= samples(hop_s)

    async def _step(self) -> None:
        """Bring the oldest stretch up to date, or to its end."""
        stretch = self._listener.stretches[0]
        if self._draft is None or self._draft.stretch is not stretch:
            config = stretch.turn.config
            self._draft = Draft(stretch, self._policy(config), self._parts.tokenizer)
        self._is_decoding = True
        try:
            if stretch.end is None or stretch.end - stretch.start > LONGEST:
                await self._update(self._draft)
            else:
                await self._finish(self._draft)
        finally:
            self._is_decoding = False

    async def _update(self, draft: Draft) -> None:
        stretch = draft.stretch
        end = min(self._newest(stretch), stretch.start + LONGEST)
        stretch.seen_to = end
        try:
            decoded = await self._decode(draft, end, is_final=False)
        except SplitscribeError as error:
            self._parts.observer.update_failed()
            self._note("an update failed: %s", error)
        else:
            if decoded is None:
                return
            self._say(stretch.turn, decoded, draft.take(decoded, end), stretch.start)
            if self._cut(draft, end):
                return
        if end - stretch.start >= LONGEST:
            self._split(draft, end)

    def _cut(self, draft: Draft, end: int) -> bool:
        """Cut off the beginning of a stretch that is long; whether there was a place for it."""
        start = draft.stretch.start
        if end - start <= SOFT_CUT:
            return False
        audio = self._audio.span(start, end)
        for segment in draft.cut(audio, anywhere=end - start > WORD_CUT):
            self._tell(segment)
        return draft.stretch.start > start

    def _newest(self, stretch: Stretch) -> int:
        """The end of the audio that is the stretch's so far."""
        if stretch.end is not None:
            return min(stretch.end, self._audio.end)
        return min(self._audio.end, self._listener.heard_to + AHEAD)

    def _split(self, draft: Draft, end: int) -> None:
        """End a stretch that is too long at a sample, though no place in it was good for that."""
        rest = draft.stretch
        front = Stretch(rest.turn, rest.start, end, speech=rest.speech_before(end))
        rest.start, rest.speech = end, rest.speech_after(end) or [(end, end)]
        draft.stretch = front
        self._listener.stretches.insert(0, front)

    async def _finish(self, draft: Draft) -> None:
        """Take the stretch that was cut to its end, and out of the listener's list."""
        stretch, turn = draft.stretch, draft.stretch.turn
        assert stretch.end is not None
        if stretch.speech and turn.error is None:
            try:
                decoded = await self._last_word(draft, stretch.end)
            except SplitscribeError as error:
                turn.error = error
                decoded = None
            if decoded is not None:
                self._say(turn, decoded, draft.settle(decoded), stretch.start)
            if not turn.is_dropped:
                for segment in draft.rest():
                    self._tell(segment)
        if turn.is_dropped:
            return
        stretch.seen_to = stretch.end
        rest = self._unheard(draft) if turn.error is None else None
        self._listener.stretches[:1] = [] if rest is None else [rest]
        self._draft = None
        if rest is None and stretch.ends_turn:
            self._complete(turn, stretch.end)

    async def _last_word(self, draft: Draft, end: int) -> Decoded | None:
        """What the stretch's last decode says: the last update's, if that heard all of it."""
        if draft.covers(draft.stretch.speech_end + COVERED):
            return draft.last
        return await self._decode(draft, min(end, self._audio.end), is_final=True)

    def _unheard(self, draft: Draft) -> Stretch | None:
        """The end of a stretch that a decoder stopped before, as a stretch of its own."""
        stretch, end = draft.stretch, draft.stretch.end
        assert end is not None
        heard_to = draft.heard_to()
        speech = stretch.speech_after(heard_to)
        if heard_to <= stretch.start or sum(last - first for first, last in speech) < UNHEARD:
            return None
        start = max(heard_to, speech[0][0] - PAUSE)
        if start <= stretch.start:
            return None
        return Stretch(stretch.turn, start, end, stretch.ends_turn, speech)

    async def _decode(self, draft: Draft, end: int, *, is_final: bool) -> Decoded | None:
        """Decode the draft's audio up to sample `end`; None where it was overtaken or cleared."""
        stretch, parts = draft.stretch, self._parts
        turn = stretch.turn
        known = stretch.start + draft.looked_to * SAMPLES_PER_POSITION
        work = Work(
            config=turn.config,
            pcm=self._audio.span(stretch.start, end),
            forced=draft.forced,
            fresh_s=seconds(end - known),
            language=turn.language,
            is_final=is_final,
        )
        self._n_updates += 1
        began_s = parts.clock.monotonic()
        updating = asyncio.ensure_future(
            parts.updates.decode(
                work,
                request_id=self._id,
                turn=turn.number,
                number=self._n_updates,
                owner=self._owner,
                peaks=self._policy(turn.config).needs_peaks,
            )
        )
        try:
            while not updating.done():
                waited_s = parts.clock.monotonic() - began_s
                if self._is_overtaken(stretch, end, waited_s, is_final=is_final):
                    self._overtaken += 1
                    parts.observer.update_overtaken()
                    parts.pace.took(waited_s)
                    return None
                await self._change_or(updating)
            decoded = await updating
        finally:
            await _cancelled(updating)
        took_s = parts.clock.monotonic() - began_s
        self._overtaken = 0
        parts.pace.took(took_s)
        parts.observer.update_answered(took_s, decoded.encode_s, parts.pace.hop_s)
        return None if turn.is_dropped else decoded

    def _is_overtaken(self, stretch: Stretch, end: int, waited_s: float, *, is_final: bool) -> bool:
        """Whether what is decoded, up to sample `end`, is of no more use."""
        if stretch.turn.is_dropped:
            return True
        if is_final:
            return False
        if stretch.end is not None:
            is_whole = stretch.end - stretch.start <= LONGEST
            return is_whole and end < stretch.speech_end + COVERED
        hop_s = self._parts.pace.hop_for(self._patience(stretch.turn.config))
        allowed_s = ALLOWANCE * hop_s * 2**self._overtaken  # so that one gets through at last
        newest = min(self._newest(stretch), stretch.start + LONGEST)
        return waited_s > allowed_s and newest - end >= samples(hop_s)

    async def _change_or(self, task: asyncio.Future[Decoded]) -> None:
        """Wait until the task is done, or there is more audio or another wish."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            both: set[asyncio.Future[Any]] = {task, changed}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()

    # -- telling -----------------------------------------------------------------------------

    def _say(self, turn: Turn, decoded: Decoded, tokens: list[Certain], start: int) -> None:
        """Tell the text of tokens that became certain."""
        if turn.is_dropped or not tokens:
            return
        turn.language = turn.language or decoded.language
        delta = turn.text.add(
            turn.number, [item.token for item in tokens], [item.logprob for item in tokens]
        )
        if delta is None:
            return
        turn.is_told = True
        self._tell(delta)
        for item in tokens:
            if item.peak is not None:
                at = start + item.peak * SAMPLES_PER_POSITION
                self._parts.observer.word_told(seconds(self._audio.end - at))

    def _complete(self, turn: Turn, end: int) -> None:
        """Tell the end of a turn."""
        turn.is_told = True
        audio_s = seconds(max(0, end - turn.start))
        self._parts.observer.turn_ended(audio_s, failed=turn.error is not None)
        if turn.error is not None:
            self._tell(TurnFailed(turn.number, turn.error))
            return
        if (delta := turn.text.finish(turn.number)) is not None:
            self._tell(delta)
        text = turn.text
        language = turn.language or turn.config.language
        self._tell(TurnCompleted(turn.number, text.told, audio_s, language, tuple(text.logprobs)))

    def _fail_all(self) -> None:
        """After a mistake of ours: every turn that was told of gets an end."""
        error = WorkerError("this live session failed; the server's log says why")
        turns = {s.turn.number: s.turn for s in self._listener.stretches}
        turns |= {turn.number: turn for turn in self._listener.pending}
        for number in sorted(turns):
            if turns[number].is_told and not turns[number].is_dropped:
                turns[number].error = error
                self._complete(turns[number], self._audio.end)

    def _end(self) -> None:
        if self._is_closed:
            return
        self._parts.activity.end(self._track)
        self._told.put_nowait(None)
        self._is_closed = True
        self._over.set()
        self._on_end(self)

    def _patience(self, config: LiveConfig) -> Patience:
        return self._parts.delay if config.delay is None else PATIENCE[config.delay]

    def _policy(self, config: LiveConfig) -> Policy:
        policy = self._parts.policy
        if isinstance(policy, AttentionPeak) and config.delay is not None:
            return replace(policy, hold_s=PATIENCE[config.delay].hold_s)
        return policy

    def _note(self, message: str, *parts: object) -> None:
        logger.warning(message, *parts, extra=log_fields(request_id=self._id))


async def _cancelled(task: asyncio.Future[Decoded]) -> None:
    """End a task that may still run, and wait for that, so that nothing is left behind."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
