"""One live session: audio in, text out as it becomes certain.

The listener says which audio belongs together; this module keeps the text of each stretch up to
date. One update runs at a time: the oldest stretch is decoded behind the tokens that are certain,
the policy says what else is, and that is told. A stretch that was cut is decoded to its end, all of
it is told, and the next one follows. Everything is driven by audio, so that nothing here waits for
a clock.

What fails costs an update; only the last decode of a stretch can fail its turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from cluster.errors import SplitscribeError, WorkerError
from cluster.logs import log_fields
from cluster.messages import Pcm
from cluster.model.encoder_context import SAMPLES_PER_POSITION
from router.live.activity import Probabilities
from router.live.attempts import Attempts
from router.live.draft import Certain, Draft
from router.live.interface import LiveConfig, LiveEvent
from router.live.listener import Listener
from router.live.parts import SessionParts
from router.live.policies import AttentionPeak, Policy
from router.live.quiet import quietest
from router.live.schedule import COVERED, LONGEST, PAUSE, Schedule
from router.live.teller import Teller
from router.live.text import TurnText, ends_sentence
from router.live.timeline import AudioBuffer, Stretch, Turn, samples, seconds
from router.live.updates import Decoded, Work

logger = logging.getLogger(__name__)

SOFT_CUT = samples(8.0)  # a stretch that is longer is cut where a sentence ended
WORD_CUT = samples(12.0)  # a stretch without such a place is cut between any two words
HARD_CUT = samples(15.0)  # one of which nothing is certain: where it is quietest behind this
UNHEARD = samples(1.0)  # speech behind the text of a last decode that is decoded by itself


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
        self._on_end = on_end
        self._audio = AudioBuffer()
        self._teller = Teller(parts.observer)
        self._listener = Listener(config, self._make_turn, self._teller.tell, self._is_finished)
        self._schedule = Schedule(parts.pace, parts.delay, self._audio, self._listener)
        self._changed = asyncio.Event()
        self._attempts = Attempts(parts, session_id, owner, self._changed)
        self._track = parts.activity.track(self._heard)
        self._over = asyncio.Event()
        self._is_draining = False
        self._mistake: Exception | None = None  # of ours, which ends the session
        self._draft: Draft | None = None  # of the stretch that is decoded
        self._working = asyncio.get_running_loop().create_task(self._work())

    # -- LiveSession -------------------------------------------------------------------------

    def configure(self, config: LiveConfig) -> None:
        self._listener.configure(config)
        self._changed.set()

    def append(self, pcm: Pcm) -> None:
        if self._teller.is_over or self._is_draining or not pcm.shape[0]:
            return
        self._audio.append(pcm)
        self._listener.appended(int(pcm.shape[0]))
        self._parts.activity.feed(self._track, pcm)

    def commit(self) -> int | None:
        if self._teller.is_over or self._is_draining:
            return None
        turn = self._listener.commit()
        self._changed.set()
        return None if turn is None else turn.number

    def clear(self) -> None:
        if self._teller.is_over:
            return
        if (turn := self._listener.clear()) is not None:
            self._teller.complete(turn, self._audio.end)
        self._changed.set()

    @property
    def unsent_s(self) -> float:
        stretches = self._listener.stretches
        settled = stretches[0].seen_to if stretches else self._listener.heard_to
        return seconds(max(0, self._audio.end - settled))

    def events(self) -> AsyncIterator[LiveEvent]:
        return self._teller.events()

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
        is_decoding = self._attempts.is_running
        return self._listener.is_waiting or is_decoding or self._schedule.is_due()

    # -- what the listener and the detector ask and tell ----------------------------------------

    def _make_turn(self, number: int, start: int, config: LiveConfig) -> Turn:
        text = TurnText(self._parts.tokenizer, logprobs=config.logprobs)
        span = self._parts.tracer.root("live turn", "", request_id=self._id, turn=number)
        return Turn(number, start, config, text, cut_at=start, spoken_to=start, span=span)

    def _is_finished(self, turn: Turn) -> bool:
        """Whether a turn's text ends a sentence, with all its audio decoded."""
        is_known = all(stretch.turn is not turn for stretch in self._listener.stretches)
        return is_known and ends_sentence(turn.text.told)

    def _heard(self, probabilities: Probabilities) -> None:
        try:
            self._listener.heard(probabilities)
            self._finish_draining()
            self._audio.drop_before(self._listener.needed_from)
        except Exception as error:  # of this session alone, and not of all that are heard with it
            self._mistake = error
        self._changed.set()

    def _finish_draining(self) -> None:
        if self._is_draining and not self._listener.is_waiting:
            self._listener.commit()

    # -- from stretches to text ----------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while not self._is_done:
                if self._mistake is not None:
                    raise self._mistake
                if self._schedule.is_due():
                    await self._step()
                else:
                    await self._changed.wait()
                    self._changed.clear()
        except Exception:
            logger.exception("a live session failed", extra=log_fields(request_id=self._id))
            error = WorkerError("this live session failed; the server's log says why")
            self._teller.fail(self._open_turns, error, self._audio.end)
        finally:
            self._end()

    @property
    def _is_done(self) -> bool:
        listener = self._listener
        is_heard = not listener.is_waiting and not listener.pending
        return self._is_draining and is_heard and not listener.stretches

    @property
    def _open_turns(self) -> list[Turn]:
        return [*(stretch.turn for stretch in self._listener.stretches), *self._listener.pending]

    async def _step(self) -> None:
        """Bring the oldest stretch up to date, or to its end."""
        stretch = self._listener.stretches[0]
        if self._draft is None or self._draft.stretch is not stretch:
            config = stretch.turn.config
            self._draft = Draft(stretch, self._policy(config), self._parts.tokenizer)
        if stretch.end is None or stretch.end - stretch.start > LONGEST:
            await self._update(self._draft)
        else:
            await self._finish(self._draft)

    async def _update(self, draft: Draft) -> None:
        stretch = draft.stretch
        end = min(self._schedule.newest(stretch), stretch.start + LONGEST)
        stretch.seen_to = end
        try:
            decoded = await self._decode(draft, end, is_final=False)
        except SplitscribeError as error:
            self._parts.observer.update_failed()
            logger.warning("an update failed: %s", error, extra=log_fields(request_id=self._id))
        else:
            if decoded is None:
                return
            self._say(draft, decoded, draft.take(decoded, end))
            if self._cut(draft, end):
                return
        if end - stretch.start >= LONGEST and not stretch.turn.is_dropped:
            self._split(draft, end)

    def _cut(self, draft: Draft, end: int) -> bool:
        """Cut off the beginning of a stretch that is long; whether there was a place for it."""
        start = draft.stretch.start
        if end - start <= SOFT_CUT:
            return False
        audio = self._audio.span(start, end)
        for segment in draft.cut(audio, anywhere=end - start > WORD_CUT):
            self._teller.tell(segment)
        return draft.stretch.start > start

    def _split(self, draft: Draft, end: int) -> None:
        """End a stretch that is too long where it is quietest, though no word there is certain."""
        rest = draft.stretch
        known = draft.looked_to * SAMPLES_PER_POSITION
        found, _ = quietest(
            self._audio.span(rest.start, end), max(HARD_CUT, known), end - rest.start
        )
        at = min(rest.start + found, end)
        draft.last = None  # it speaks of audio behind the cut too
        front = Stretch(rest.turn, rest.start, at, speech=rest.speech_before(at))
        rest.start = rest.seen_to = at
        rest.speech = rest.speech_after(at) or [(at, at)]
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
                self._say(draft, decoded, draft.settle(decoded))
            if not turn.is_dropped:
                for segment in draft.rest():
                    self._teller.tell(segment)
        if turn.is_dropped:
            return
        stretch.seen_to = stretch.end
        rest = self._unheard(draft) if turn.error is None else None
        self._listener.stretches[:1] = [] if rest is None else [rest]
        self._draft = None
        if rest is None and stretch.ends_turn:
            self._teller.complete(turn, stretch.end if turn.end is None else turn.end)

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
        stretch, attempts = draft.stretch, self._attempts
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
        return await attempts.decode(
            work,
            turn,
            peaks=self._policy(turn.config).needs_peaks,
            is_overtaken=lambda waited_s: self._schedule.is_overtaken(
                stretch, end, waited_s, attempts.overtaken, is_final=is_final
            ),
        )

    def _say(self, draft: Draft, decoded: Decoded, tokens: list[Certain]) -> None:
        stretch = draft.stretch
        self._teller.say(stretch.turn, decoded.language, tokens, stretch.start, self._audio.end)

    def _end(self) -> None:
        if self._teller.is_over:
            return
        self._parts.activity.end(self._track)
        for turn in self._open_turns:
            turn.span.end()
        self._teller.end()
        self._over.set()
        self._on_end(self)

    def _policy(self, config: LiveConfig) -> Policy:
        policy = self._parts.policy
        if isinstance(policy, AttentionPeak) and config.delay is not None:
            return replace(policy, hold_s=self._schedule.patience(config).hold_s)
        return policy
