"""Requests of programs that are not installed here, sent as they make them, read as they read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.e2e.works_with import recorded
from tests.e2e.works_with.recorded import Recorded
from tests.support.audio.sounds import silence
from tests.support.audio.speech import pcm_of, wav_of
from tests.support.in_process import in_process_server, translating_model

pytestmark = pytest.mark.slow
ANSWER_S = 60.0


def send(server: Server, request: Recorded, audio: bytes) -> httpx.Response:
    answer = httpx.post(server.url + request.path, timeout=ANSWER_S, **request.arguments(audio))
    assert answer.status_code == 200, answer.text
    return answer


@pytest.fixture(scope="module")
def audio() -> bytes:
    return wav_of(pcm_of("short"))


@pytest.mark.parametrize(
    "request_",
    [
        recorded.OPEN_WEBUI_FORM,
        recorded.OPEN_WEBUI_FORM_AGAIN,
        recorded.OPEN_WEBUI_JSON,
        recorded.LIBRECHAT,
        recorded.NEXTCLOUD,
    ],
    ids=lambda one: one.program,
)
def test_the_text_is_in_text(server: Server, said: str, audio: bytes, request_: Recorded) -> None:
    assert send(server, request_, audio).json()["text"] == said


def test_open_webui_asks_again_without_a_language_that_is_refused(
    server: Server, said: str, audio: bytes
) -> None:
    first = recorded.OPEN_WEBUI_FORM.arguments(audio)
    first["files"][1] = ("language", (None, "tlh"))
    refused = httpx.post(server.url + recorded.TRANSCRIPTIONS, timeout=ANSWER_S, **first)
    assert refused.status_code == 400
    assert "tlh" in refused.json()["error"]["message"], "shown where the second try fails too"
    assert send(server, recorded.OPEN_WEBUI_FORM_AGAIN, audio).json()["text"] == said


def test_librechat_takes_an_empty_text_for_an_error(server: Server) -> None:
    """It is one there, so the page says what to set. Silence has an empty text here."""
    answer = send(server, recorded.LIBRECHAT, wav_of(silence(2.0)))
    assert answer.json()["text"] == ""


def test_n8n_samples_a_little(server: Server, audio: bytes) -> None:
    assert len(send(server, recorded.N8N, audio).json()["text"].split()) > 5


def test_nextcloud_reads_the_duration_off_the_last_segment_or_cue(
    server: Server, audio: bytes, tmp_path: Path
) -> None:
    duration = len(pcm_of("short")) / 16_000
    answer = send(server, recorded.NEXTCLOUD, audio).json()
    assert 0 < answer["segments"][-1]["end"] <= duration + 0.1
    with in_process_server({"model": translating_model(tmp_path)}) as url:
        cues = send(replace(server, url=url), recorded.NEXTCLOUD_SUBTITLES, audio).text
    times = re.findall(r"(\d\d):(\d\d):(\d\d)[.,](\d\d\d)", cues)
    hours, minutes, seconds, milliseconds = map(int, times[-1])
    assert 0 < hours * 3600 + minutes * 60 + seconds + milliseconds / 1000 <= duration + 0.1


@pytest.mark.parametrize(
    "request_", [recorded.VLLM_BENCH, recorded.GUIDELLM], ids=lambda one: one.program
)
def test_benchmarks_find_text_and_tokens(
    server: Server, said: str, audio: bytes, request_: Recorded
) -> None:
    text, n_tokens = "", None
    for line in send(server, request_, audio).text.splitlines():
        chunk = line.removeprefix("data: ").strip()
        if not line.startswith("data: ") or chunk == "[DONE]":
            continue
        event = json.loads(chunk)
        if choices := event.get("choices"):
            text += choices[0]["delta"].get("content") or ""
        elif usage := event.get("usage"):
            n_tokens = usage.get("completion_tokens")
    assert text.strip() == said
    assert n_tokens


def test_bazarr_gets_subtitles_and_the_language(server: Server, said: str) -> None:
    samples = pcm_of("short").tobytes()
    cues = send(server, recorded.BAZARR, samples).text
    texts = [block.split("\n", 2)[2] for block in cues.strip().split("\n\n")]
    assert " ".join(texts) == said
    found = send(server, recorded.BAZARR_DETECTS, samples).json()
    assert (found["language_code"], found["detected_language"]) == ("en", "english")
