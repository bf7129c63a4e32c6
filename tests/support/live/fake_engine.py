"""A live engine that needs no workers, and keeps the contract of `router.live.session`.

Each second of audio whose first sample is not 0 is the word of that sample; a second of zeros ends
a turn, where turn detection is on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from cluster.common.errors import OverloadedError, SplitscribeError, WorkerGoneError
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.live.interface import (
    LiveConfig,
    LiveEvent,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TurnCommitted,
    TurnCompleted,
    TurnFailed,
)
from router.transcript import TokenLogprob

BAD = 666  # a second of this sample makes its turn fail


def spoken(*words: int, rate: int = SAMPLE_RATE) -> bytes:
    return b"".join(np.full(rate, word, "<i2").tobytes() for word in words)


class FakeLiveSession:
    def __init__(self, engine: FakeLiveEngine, config: LiveConfig, owner: bytes) -> None:
        self.engine, self.configs, self.owner = engine, [config], owner
        self.appended: list[Pcm] = []
        self.closed = False
        self.is_draining = False
        self._queue: asyncio.Queue[LiveEvent | None] = asyncio.Queue()
        self._rest = np.zeros(0, np.int16)
        self._turn = 0
        self._turn_s = 0.0
        self._text = ""
        self._is_told = False
        self._error: SplitscribeError | None = None
        self._n = 0

    @property
    def config(self) -> LiveConfig:
        return self.configs[-1]

    def configure(self, config: LiveConfig) -> None:
        self.configs.append(config)

    def append(self, pcm: Pcm) -> None:
        if self.closed or self.is_draining:
            return
        self.appended.append(pcm)
        self._n += len(pcm)
        if self.engine.is_stuck:
            return
        self._rest = np.concatenate([self._rest, pcm])
        while len(self._rest) >= SAMPLE_RATE:
            second, self._rest = self._rest[:SAMPLE_RATE], self._rest[SAMPLE_RATE:]
            self._second(int(second[SAMPLE_RATE // 2]))

    def _second(self, word: int) -> None:
        detects = self.config.turn_detection is not None
        if word == 0 and detects:
            if self._is_told:
                self._tell(SpeechStopped(self._turn, round(1000 * self._n / SAMPLE_RATE)))
                self._commit()
            return
        if not self._is_told and detects:
            self._tell(SpeechStarted(self._turn, round(1000 * self._n / SAMPLE_RATE)))
        self._is_told = True
        self._turn_s += 1.0
        if word == BAD:
            self._error = WorkerGoneError("the worker is gone")
        elif word:
            text = f" w{word}" if self._text else f"w{word}"
            self._text += text
            logprobs = (TokenLogprob(text, -0.5, tuple(text.encode())),)
            self._tell(TextDelta(self._turn, text, logprobs if self.config.logprobs else ()))

    def commit(self) -> int | None:
        turn = self._turn
        if not self._is_told and not (len(self._rest) and self.config.turn_detection is None):
            self._rest = self._rest[:0]
            return None
        self._turn_s += len(self._rest) / SAMPLE_RATE
        self._rest = self._rest[:0]
        self._commit()
        return turn

    def _commit(self) -> None:
        self._tell(TurnCommitted(self._turn))
        self._end_turn()

    def _end_turn(self) -> None:
        if self._error is not None:
            self._tell(TurnFailed(self._turn, self._error))
        else:
            language = self.config.language or "en"
            self._tell(TurnCompleted(self._turn, self._text, self._turn_s, language))
        self._turn += 1
        self._turn_s, self._text, self._is_told, self._error = 0.0, "", False, None

    def clear(self) -> None:
        self._rest = self._rest[:0]
        if self._is_told:
            self._end_turn()

    @property
    def unsent_s(self) -> float:
        seconds = self._n if self.engine.is_stuck else len(self._rest)
        return seconds / SAMPLE_RATE

    async def events(self) -> AsyncIterator[LiveEvent]:
        while (event := await self._queue.get()) is not None:
            if self.engine.crash is not None:
                raise self.engine.crash
            yield event

    def take_events(self) -> list[LiveEvent]:
        taken: list[LiveEvent] = []
        while self.engine.crash is None and not self._queue.empty():
            event = self._queue.get_nowait()
            if event is None:
                self._queue.put_nowait(None)
                break
            taken.append(event)
        return taken

    async def drain(self) -> None:
        self.is_draining = True
        if self.engine.is_stuck:
            await asyncio.Event().wait()
        if self.commit() is None and self._is_told:
            self._commit()
        self._queue.put_nowait(None)

    async def close(self) -> None:
        self.closed = True
        self._queue.put_nowait(None)

    def _tell(self, event: LiveEvent) -> None:
        self._queue.put_nowait(event)


class FakeLiveEngine:
    """is_full: refuses sessions; is_stuck: transcribes nothing; crash: raised by `events`."""

    def __init__(self) -> None:
        self.sessions: list[FakeLiveSession] = []
        self.is_full = self.is_stuck = False
        self.crash: Exception | None = None

    def open(self, config: LiveConfig, *, session_id: str, owner: bytes = b"") -> FakeLiveSession:
        if self.is_full:
            raise OverloadedError("too many live sessions", code="overloaded")
        self.sessions.append(FakeLiveSession(self, config, owner))
        return self.sessions[-1]

    async def close(self) -> None:
        for session in self.sessions:
            await session.close()
