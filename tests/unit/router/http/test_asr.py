"""`/asr` and `/detect-language`: what clients of whisper-asr-webservice send, and read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from router.api.formats import WRITERS
from router.api.params import Chunking, SpeakerOptions
from router.api.subtitles import PLAIN
from router.audio.containers import wav_head
from router.http.routes import create_app
from tests.support.router_fakes import (
    AUDIO,
    FakeTranscriber,
    client_of,
    make_registry,
    make_settings,
    make_transcript,
    open_files,
)

FILES = {"audio_file": ("Film äö.mkv", AUDIO)}
PCM = bytes(range(256)) * 8


@pytest.fixture
async def asr(transcriber: FakeTranscriber, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = make_settings(asr_webservice=True)
    app = create_app(make_registry(transcriber), settings)
    async with client_of(app) as client:
        yield client
    assert not open_files(tmp_path), "nothing stays on disk"


async def test_both_are_off_unless_a_setting_turns_them_on(client: httpx.AsyncClient) -> None:
    for path in ("/asr", "/detect-language"):
        assert (await client.post(path, files=FILES)).status_code == 404


async def test_every_output_is_what_openai_whisper_writes(
    asr: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    transcript = make_transcript(*transcriber.texts)
    for output, write in WRITERS.items():
        answer = await asr.post("/asr", params={"output": output}, files=FILES)
        assert answer.status_code == 200
        assert answer.text == write(transcript, PLAIN)
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        named = answer.headers["content-disposition"]
        assert named == f'attachment; filename="Film%20%C3%A4%C3%B6.mkv.{output}"'
        assert "total;dur=" in answer.headers["server-timing"]


async def test_text_is_the_default(asr: httpx.AsyncClient) -> None:
    plain = await asr.post("/asr", files=FILES)
    assert plain.text == "Hello there.\nGeneral.\n"
    assert (await asr.post("/asr?output=text", files=FILES)).text == plain.text


async def test_headerless_samples_get_a_header(
    asr: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    query = {"task": "transcribe", "language": "de", "output": "srt", "encode": "false"}
    await asr.post("/asr", params=query, files={"audio_file": ("audio_file", PCM)})
    await asr.post("/asr", params={"encode": "true"}, files=FILES)
    assert transcriber.uploads == [wav_head() + PCM, AUDIO]


async def test_parameters_become_those_of_the_request(
    asr: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    query = {
        "language": "German",
        "initial_prompt": "Grüße",
        "word_timestamps": "true",
        "vad_filter": "True",
        "video_file": "/films/a.mkv",
        "min_speakers": "2",
        "diarize": "false",
    }
    await asr.post("/asr", params=query, files=FILES)
    await asr.post("/asr", params={"task": "translate", "word_timestamps": "1"}, files=FILES)
    said, translated = transcriber.params
    assert (said.task, said.language, said.prompt) == ("transcribe", "de", "Grüße")
    assert said.words
    assert said.chunking == Chunking()
    assert (translated.task, translated.words, translated.chunking) == ("translate", True, None)
    assert said.speakers.by is None
    await asr.post("/asr?diarize=true&min_speakers=2&max_speakers=", files=FILES)
    assert transcriber.params[-1].speakers == SpeakerOptions("voice", min_speakers=2)
    await asr.post("/asr?channels=separate", files=FILES)
    assert transcriber.params[-1].speakers == SpeakerOptions("channel")


async def test_the_language_is_told_with_its_probability(
    asr: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    transcriber.language = "de"
    files = {"audio_file": ("audio_file", PCM)}
    answer = await asr.post("/detect-language?encode=false", files=files)
    assert answer.json() == {
        "detected_language": "german",
        "language_code": "de",
        "confidence": 0.75,
    }
    assert transcriber.uploads == [wav_head() + PCM]


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/asr?output=docx", 400, "output"),
        ("/asr?task=summarize", 400, "task"),
        ("/asr?encode=perhaps", 400, "encode"),
        ("/asr?diarize=true&min_speakers=x", 400, "min_speakers"),
        ("/asr?language=xx", 400, "language"),
        ("/asr?model=gpt-5", 404, None),
        ("/detect-language?encode=perhaps", 400, "encode"),
        ("/detect-language?model=gpt-5", 404, None),
    ],
)
async def test_what_is_wrong_is_named_for_both_kinds_of_clients(
    asr: httpx.AsyncClient, path: str, status: int, param: str | None
) -> None:
    answer = await asr.post(path, files=FILES)
    body = answer.json()
    assert answer.status_code == status
    assert body["detail"] == body["error"]["message"]
    assert body["error"]["param"] == param


async def test_a_key_is_asked_for_and_may_stand_in_the_url(transcriber: FakeTranscriber) -> None:
    settings = make_settings(asr_webservice=True, api_key=("right",))
    app = create_app(make_registry(transcriber), settings)
    async with client_of(app) as client:
        for path in ("/asr", "/detect-language"):
            assert (await client.post(path, files=FILES)).status_code == 401
            for auth in (("any", "wrong"), ("any", "")):
                assert (await client.post(path, files=FILES, auth=auth)).status_code == 401
            assert (await client.post(path, files=FILES, auth=("any", "right"))).status_code == 200
            bearer = {"authorization": "Bearer right"}
            assert (await client.post(path, files=FILES, headers=bearer)).status_code == 200
