"""A transcriber that needs no workers, servers and clients for it: for tests of the routes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from cluster.common.messages import Role, Task, WorkerStatus
from cluster.common.settings import RouterSettings
from router.api.params import TranscriptionParams
from router.api.responses import ErrorResponse
from router.http.models import ModelRegistry, ServedModel
from router.interface import (
    PoolHealth,
    RequestContext,
    StageTimings,
    Transcriber,
    TranscriptionResult,
    Update,
)
from router.transcript import Channel, Segment, TokenLogprob, Transcript, Word
from tests.support.waiting import wait_until

NAMES = ("openai/whisper-large-v3", "demo")
LANGUAGES = ("en", "de", "ja")
URL = "/v1/audio/transcriptions"
TRANSLATIONS_URL = "/v1/audio/translations"
AUDIO = b"RIFF....WAVE"
MODEL_FORM = {"model": "whisper-1"}
LIMIT = 200_000  # bytes of the largest upload in these tests
TIMINGS = StageTimings(
    audio_s=0.001,
    queue_s=0.002,
    encode_s=0.003,
    transfer_s=0.004,
    decode_s=0.005,
    transfer_bytes=1024,
    steps=7,
    windows=2,
    attempts=2,
)


def make_segment(index: int = 0, text: str = " Hello there.", start: float = 0.0) -> Segment:
    return Segment(
        id=index,
        seek=0,
        start=start,
        end=start + 1.5,
        text=text,
        tokens=(50364, 2425, 456, 13, 50439),
        temperature=0.0,
        avg_logprob=-0.25,
        compression_ratio=0.7,
        no_speech_prob=0.01,
        words=make_words(text, start),
    )


def make_words(text: str, start: float) -> tuple[Word, ...]:
    return tuple(
        Word(start + 0.5 * i, start + 0.5 * (i + 1), f" {word}", 0.9)
        for i, word in enumerate(text.split())
    )


def make_transcript(
    *texts: str, duration_s: float = 8.47, task: Task = "transcribe", language: str = "en"
) -> Transcript:
    segments = tuple(make_segment(i, text, 2.0 * i) for i, text in enumerate(texts))
    return Transcript(task, language, duration_s, "".join(texts).strip(), segments)


def make_updates(transcript: Transcript) -> list[Update]:
    updates = []
    for i, segment in enumerate(transcript.segments):
        text = segment.text if i else segment.text.lstrip()
        logprob = TokenLogprob(segment.text, -0.5, tuple(segment.text.encode()))
        updates.append(Update(text, (segment,), (logprob,)))
    return updates


def make_registry(
    transcriber: Transcriber,
    languages: tuple[str, ...] = LANGUAGES,
    live: Any | None = None,
) -> ModelRegistry:
    model = ServedModel(NAMES, languages, transcriber, created=1_700_000_000, live=live)
    return ModelRegistry([model])


def make_settings(**changes: Any) -> RouterSettings:
    return RouterSettings(**{"max_upload_bytes": LIMIT, **changes})


class FakeTranscriber:
    """Answers at once, raises `error`, or, while `hold` is set, works until cancelled.

    n_updates: how many updates it tells before that, if not all; None: it finds no audio.
    """

    def __init__(self) -> None:
        self.uploads: list[bytes] = []
        self.params: list[TranscriptionParams] = []
        self.contexts: list[RequestContext] = []
        self.error: BaseException | None = None
        self.n_updates: int | None = None
        self.hold = False
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.health_error: Exception | None = None
        self.ready = True
        self.n_workers = 1  # of each pool
        self.language = "en"
        self.texts: tuple[str, ...] = (" Hello there.", " General.")
        self.channels: tuple[Channel, ...] = ()
        self.timings = TIMINGS

    def check(self, params: TranscriptionParams) -> None:
        """It has all networks."""

    async def transcribe(
        self, upload: Path, params: TranscriptionParams, context: RequestContext
    ) -> TranscriptionResult:
        self.uploads.append(await asyncio.to_thread(upload.read_bytes))
        self.params.append(params)
        self.contexts.append(context)
        self.started.set()
        transcript = make_transcript(*self.texts, task=params.task, language=self.language)
        transcript = replace(transcript, channels=self.channels)
        updates = make_updates(transcript)
        stops = self.hold or self.error is not None
        if not stops or self.n_updates is not None:
            context.found_audio(transcript.duration_s)
        for update in updates[: self.n_updates or 0] if stops else updates:
            context.update(update)
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        try:
            if self.hold:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return TranscriptionResult(transcript, self.timings)

    async def detect_language(self, upload: Path, context: RequestContext) -> tuple[str, float]:
        self.uploads.append(await asyncio.to_thread(upload.read_bytes))
        self.contexts.append(context)
        if self.error is not None:
            raise self.error
        return self.language, 0.75

    async def health(self) -> dict[Role, PoolHealth]:
        if self.health_error is not None:
            raise self.health_error
        worker = WorkerStatus("encoder-1", "encoder", True, "demo", "nixl", "cpu", 3, 4, 0, 1)
        n_workers = self.n_workers
        return {
            "encoder": PoolHealth(True, n_workers, [worker] * n_workers),
            "decoder": PoolHealth(self.ready, n_workers),
        }


def open_files(folder: Path) -> list[str]:
    found = [str(path) for path in folder.iterdir()]
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    return [name for name in found if name.startswith(f"{folder}/")]


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def post(
    client: httpx.AsyncClient, content: bytes = AUDIO, url: str = URL, **form: Any
) -> httpx.Response:
    return await client.post(url, data={**MODEL_FORM, **form}, files={"file": ("a.wav", content)})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    body: dict[str, Any] = answer.json()
    ErrorResponse.model_validate(body)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@contextmanager
def running_server(app: Any) -> Iterator[str]:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
