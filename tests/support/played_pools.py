"""Audio and worker pools whose behaviour a test chooses, and requests that go through them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster.common.messages import (
    SAMPLE_RATE,
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    DecodeTimings,
    EncodeReply,
    EncodeRequest,
    EncodeTimings,
)
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import RouterSettings
from cluster.common.settings_sources import load_settings
from cluster.planning.virtual_time import virtual_clock
from router.api.params import TranscriptionParams
from router.audio.windows import Window
from router.interface import RequestContext, TranscriptionResult
from router.transcriber import RequestTranscriber
from tests.support.checkpoints import cached_checkpoint
from tests.support.requests import AnyPool, handle_of

Fault = Callable[[int, int], Exception | None]  # (window, nth call for it) -> what to raise


class PlayedAudio:
    def __init__(self, n: int, error: Exception | None = None) -> None:
        self.n, self.error = n, error
        self.closed = False

    @asynccontextmanager
    async def open(
        self, upload: Path, context: RequestContext, **_: Any
    ) -> AsyncIterator[PlayedStream]:
        try:
            yield PlayedStream(self.n, self.error)
        finally:
            self.closed = True


class PlayedStream:
    expected_s: float | None = None
    decode_s = 0.001

    def __init__(self, n: int, error: Exception | None) -> None:
        self.n, self.error = n, error
        self.duration_s = 2.0 * n
        self._next = 0

    def __aiter__(self) -> PlayedStream:
        return self

    async def __anext__(self) -> Window:
        await asyncio.sleep(0)
        if self._next == self.n:
            if self.error is not None:
                raise self.error
            raise StopAsyncIteration
        index = self._next
        self._next += 1
        pcm = np.full(2 * SAMPLE_RATE, index, np.int16)
        return Window(index, index * 2 * SAMPLE_RATE, pcm)


class PlayedPools(AnyPool):
    def __init__(self, tokenizer: WhisperTokenizer) -> None:
        self.tokenizer = tokenizer
        self.encode_fault: Fault = lambda window, nth: None
        self.decode_fault: Fault = lambda window, nth: None
        self.no_speech: Callable[[int], float] = lambda window: 0.0
        self.breaks_off: Callable[[int, int], bool] = lambda window, nth: False
        self.breaks_at = 25  # steps of 20 ms
        self.delay_s: Callable[[int], float] = lambda window: 0.0
        self.doubts: Callable[[int], bool] = lambda window: False  # if its context was trimmed
        self.contexts: dict[int, list[int]] = {}
        self.encodes: dict[int, int] = {}
        self.lengths: dict[int, list[int]] = {}
        self.encoded: list[EncodeRequest] = []
        self.decoded: list[DecodeRequest] = []
        self.reused: bool | None = None
        self.decodes: dict[int, int] = {}
        self.languages: dict[int, str | None] = {}
        self.options: dict[int, DecodeOptions] = {}
        self.traceparents: list[str] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self.started = asyncio.Event()

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        nth = self.encodes[request.window] = self.encodes.get(request.window, 0) + 1
        self.traceparents.append(request.traceparent)
        self.lengths.setdefault(request.window, []).append(request.n_samples)
        self.encoded.append(request)
        self.contexts.setdefault(request.window, []).append(request.context)
        if error := self.encode_fault(request.window, nth):
            raise error
        handle = handle_of(request, f"lease-{request.window}-{nth}")
        return EncodeReply(handle, EncodeTimings(0.01, 0.02, 1), reused=self.reused)

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        nth = self.decodes[request.window] = self.decodes.get(request.window, 0) + 1
        self.traceparents.append(request.traceparent)
        self.languages[request.window] = request.options.language
        self.options[request.window] = request.options
        self.decoded.append(request)
        self.running += 1
        self.started.set()
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.01 + self.delay_s(request.window))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        begin = self.tokenizer.special.timestamp_begin
        text = self.tokenizer.encode(f" word{request.window}")
        if error := self.decode_fault(request.window, nth):
            raise error
        if self.breaks_off(request.window, nth):
            lost = self.tokenizer.encode(" lost")
            tokens = (begin, *text, *[begin + self.breaks_at] * 2, *lost)
        else:
            tokens = (begin, *text, begin + 50)
        doubted = request.handle.frames < 1500 and self.doubts(request.window)
        return DecodeResult(
            request.request_id, request.window, tokens, (0.0,) * len(tokens),
            -2.0 if self.no_speech(request.window) > 0.6 else -0.1,
            self.no_speech(request.window), request.options.language or "de", 0.0, "stop",
            DecodeTimings(0.01, 0.01, 100, "memory", 0.01, 0.01, 3),
            doubted=doubted,
        )  # fmt: skip


DIMS = open_checkpoint(str(cached_checkpoint("micro"))).dims
SETTINGS: RouterSettings = load_settings(environ={}).router
PARAMS = TranscriptionParams(model="demo", language="en")


def request_of(seconds: float = 30.0, **changes: Any) -> RequestContext:
    return replace(RequestContext.unlimited("r1", seconds, virtual_clock()), **changes)


async def transcribe(
    pools: PlayedPools,
    n: int | PlayedAudio = 3,
    params: TranscriptionParams = PARAMS,
    context: RequestContext | None = None,
    chance: int = 0,
    **options: Any,
) -> TranscriptionResult:
    audio: Any = PlayedAudio(n) if isinstance(n, int) else n
    parts = (audio, pools, pools, pools.tokenizer, SETTINGS)
    transcriber = RequestTranscriber(*parts, dims=DIMS, clock=virtual_clock(chance), **options)
    return await transcriber.transcribe(Path("none"), params, context or request_of())


async def run(pools: PlayedPools, *arguments: Any, **options: Any) -> str:
    return (await transcribe(pools, *arguments, **options)).transcript.text
