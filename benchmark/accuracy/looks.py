"""Windows through both engines in this process, the encoder's context as short as it is told.

One look at a window is an encode with a given context and one greedy decode with timestamps. What
it costs and what it says is all that is known here. The decoder says which windows it doubts, as it
does in the server. Uses the product's cutter, engines and rules for segments; no HTTP, no Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmark.shared.clips import Clip
from cluster.common.messages import (
    FRAMES_PER_S,
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
)
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import Settings
from cluster.serve.in_process import LocalEngines, local_engines
from router.api.params import PARALLEL_GATES
from router.audio.cutter import WindowCutter
from router.audio.vad import SpeechDetector
from router.pipeline import WindowAudio
from router.transcript_builder import gather_window

NO_DEADLINE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Piece:
    """One window of a recording, as the product cuts it; `clip` counts the part's recordings."""

    clip: int
    audio: WindowAudio


@dataclass(frozen=True, slots=True)
class Part:
    """Some recordings, in windows; one in which nobody speaks has none."""

    n_clips: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """What one look made of some windows: texts and doubts in their order, and the time of all."""

    texts: list[str]
    doubted: list[bool]
    wall_s: float


def cut(clips: Sequence[Clip], detector: SpeechDetector) -> Part:
    """Every window of every recording, in order."""
    pieces: list[Piece] = []
    for index, clip in enumerate(clips):
        cutter = WindowCutter(detector)
        found = [*cutter.feed(clip.pcm()), *cutter.finish()]
        windows = [window for window in found if window is not None]
        pieces += [
            Piece(index, WindowAudio.of_samples(number, window.pcm))
            for number, window in enumerate(windows)
        ]
    return Part(len(clips), tuple(pieces))


class Looker:
    """Both engines of one checkpoint, with a bounded number of windows in flight."""

    def __init__(self, engines: LocalEngines, language: str | None, in_flight: int) -> None:
        self.tokenizer = WhisperTokenizer.from_checkpoint(engines.checkpoint)
        self.n_audio_ctx = engines.checkpoint.dims.n_audio_ctx
        self.device = engines.settings.encoder.device
        self._encoders = engines.pool("encoder")
        self._decoders = engines.pool("decoder")
        self._options = DecodeOptions(language=language, gates=PARALLEL_GATES)
        self._in_flight = in_flight
        self._n_sent = 0

    async def look(self, pieces: Sequence[Piece], contexts: Sequence[int]) -> Look:
        """Look once at every window; contexts: encoder positions of each, 0 for all there are."""
        slots = asyncio.Semaphore(self._in_flight)

        async def one(piece: Piece, context: int) -> DecodeResult:
            async with slots:
                return await self._decode(piece, context)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(piece, context))
                for piece, context in zip(pieces, contexts, strict=True)
            ]
        wall_s = time.perf_counter() - began
        results = [task.result() for task in tasks]
        pairs = list(zip(pieces, results, strict=True))
        return Look(
            [self._text(piece, result) for piece, result in pairs],
            [result.doubted for result in results],
            wall_s,
        )

    async def _decode(self, piece: Piece, context: int) -> DecodeResult:
        self._n_sent += 1
        name = f"look-{self._n_sent}"
        encoded = await self._encoders.encode(
            EncodeRequest(
                request_id=name,
                window=piece.audio.index,
                attempt=1,
                pcm=piece.audio.pcm,
                remaining_s=NO_DEADLINE_S,
                context=context,
            )
        )
        return await self._decoders.decode(
            DecodeRequest(
                request_id=name,
                window=piece.audio.index,
                attempt=1,
                handle=encoded.handle,
                options=self._options,
                remaining_s=NO_DEADLINE_S,
                content_frames=piece.audio.content_frames,
            )
        )

    def _text(self, piece: Piece, result: DecodeResult) -> str:
        found = gather_window(
            result,
            PARALLEL_GATES,
            offset_s=0.0,
            duration_s=piece.audio.content_frames / FRAMES_PER_S,
            tokenizer=self.tokenizer,
            keep_tail=True,
        )
        return "".join(segment.text for segment in found.segments).strip()


@asynccontextmanager
async def looker(settings: Settings, language: str | None, in_flight: int) -> AsyncIterator[Looker]:
    """Engines of `settings.model`, closed at the end."""
    async with local_engines(settings) as engines:
        yield Looker(engines, language, in_flight)
