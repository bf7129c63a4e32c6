"""Finds the speaker of each piece of speech in a live session.

An audio worker computes the vector of a piece. The session's voices stay in the router, so that any
worker can take the next piece. Given names are never taken back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from cluster.common.errors import SplitscribeError
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.audio.containers import wav_head
from router.audio.pool import AudioPool
from router.audio.protocol import SpeakerSearch, Voice, as_file
from router.interface import RequestContext
from router.speakers.voices import name_of

logger = logging.getLogger(__name__)

LEAST_S = 1.5  # of speech in a piece that may introduce a new voice
HEAR_TIME_S = 5.0  # time limit, after which a piece has no speaker

Hear = Callable[[Pcm], Awaitable[Voice | None]]


async def hear(audio: AudioPool, pcm: Pcm) -> Voice | None:
    """The voice of a piece of speech. None if it has none, or if workers fail or are busy."""
    try:
        async with asyncio.timeout(HEAR_TIME_S), as_file(wav_head() + pcm.tobytes()) as path:
            context = RequestContext.unlimited("live", HEAR_TIME_S)
            heard = await audio.survey(path, context, SpeakerSearch(is_one=True))
            return heard.result.voice
    except (SplitscribeError, OSError) as error:  # TimeoutError and a full disk are OSErrors
        logger.warning("a piece of a live session has no speaker: %s", error)
        return None


class SessionVoices:
    def __init__(self, hear: Hear, threshold: float) -> None:
        self._hear = hear
        self._least_cosine = SpeakerSearch(threshold=threshold).least_cosine
        self._sums: list[NDArray[np.float32]] = []  # of each voice's vectors, weighted by seconds

    async def speakers_of(self, pieces: Iterable[Pcm]) -> list[str | None]:
        """A, B, C and so on, in order of appearance. None: not certain yet."""
        return [self._named(voice) for voice in await asyncio.gather(*map(self._hear, pieces))]

    def _named(self, voice: Voice | None) -> str | None:
        if voice is None:
            return None
        vector, speech_s = np.array(voice[0], np.float32), voice[1] / SAMPLE_RATE
        cosines = [float(one @ vector / np.linalg.norm(one)) for one in self._sums]
        number = int(np.argmax(cosines)) if cosines else 0
        if not cosines or cosines[number] < self._least_cosine:
            if speech_s < LEAST_S:
                return None
            number = len(self._sums)
            self._sums.append(np.zeros_like(vector))
        self._sums[number] += np.float32(speech_s) * vector
        return name_of(number, ())
