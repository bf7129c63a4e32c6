"""What tests do on the page at `/`, and what the API says of the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from playwright.sync_api import Page, Route, expect

from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server

WAIT_MS = 30_000
FORM = {
    "model": "whisper-1",
    "response_format": "verbose_json",
    "timestamp_granularities[]": ["word", "segment"],
}


def ask(server: Server, name: str) -> dict[str, Any]:
    files = {"file": (f"{name}.flac", sample_path(name).read_bytes())}
    url = f"{server.url}/v1/audio/transcriptions"
    stream = httpx.post(url, data={**FORM, "stream": "true"}, files=files, timeout=120).text
    events = [line for line in stream.splitlines() if line.startswith("data: {")]
    done: dict[str, Any] = json.loads(events[-1].removeprefix("data: "))
    assert done["type"] == "transcript.text.done"
    return done


def transcribe(page: Page, *names: str) -> None:
    page.set_input_files("#file-input", [sample_path(name) for name in names])
    expect(page.locator("[data-state=done]")).to_have_count(len(names), timeout=WAIT_MS)


def downloaded(page: Page, press: Callable[[], None]) -> str:
    with page.expect_download() as download:
        press()
    return Path(download.value.path()).read_text()


def answered_with(
    text: str, n_segments: int = 1, speakers: tuple[str, ...] = (), timing: str | None = None
) -> Callable[[Route], None]:
    n_words = len(text.split())
    step = 2.9 / n_words
    segments = [
        {"id": i, "start": 3.0 * i, "end": 3.0 * i + 2.9, "text": text} for i in range(n_segments)
    ]
    for segment, speaker in zip(segments, speakers, strict=False):
        segment["speaker"] = speaker
    words = [
        {"word": word, "start": start, "end": start + step, "probability": 0.9}
        for i in range(n_segments)
        for word, start in zip(text.split(), 3.0 * i + step * np.arange(n_words), strict=True)
    ]
    whole = {
        "type": "transcript.text.done",
        "task": "transcribe",
        "language": text,
        "duration": 3.0 * n_segments,
        "text": text,
        "segments": segments,
        "words": words,
        "server_timing": timing or f'encode;dur=1.0;desc="{text}", total;dur=2.0',
    }
    delta = {"type": "transcript.text.delta", "delta": text, "segments": segments}
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in (delta, whole))

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=f"{body}data: [DONE]\n\n")

    return answer
