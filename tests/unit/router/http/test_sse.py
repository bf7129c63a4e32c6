"""Streams through OpenAI's SDK and over bare HTTP: whole, failing, quiet, left by the client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent

from cluster.common.errors import (
    AudioTooShortError,
    DeadlineExceededError,
    OverloadedError,
    SplitscribeError,
)
from router.api.params import TranscriptionParams
from router.api.responses import VerboseTranscriptionResponse
from router.http import sse
from router.http.routes import create_app
from router.http.sse import EventWriter
from router.interface import Update
from tests.support.router_fakes import (
    AUDIO,
    MODEL_FORM,
    URL,
    FakeTranscriber,
    make_registry,
    make_settings,
    open_files,
    running_server,
    wait_until,
)

STREAM = {**MODEL_FORM, "stream": "true"}


@pytest.fixture
def url(transcriber: FakeTranscriber, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.05)
    app = create_app(make_registry(transcriber), make_settings())
    with running_server(app) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post_stream(url: str, **form: str) -> httpx.Response:
    files = {"file": ("a.wav", AUDIO)}
    return httpx.post(f"{url}{URL}", data={**STREAM, **form}, files=files, timeout=20)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of every event but [DONE], of which there must be one, at the end."""
    assert answer.status_code == 200, answer.text
    blocks = [block for block in answer.text.split("\n\n") if block.startswith("data: ")]
    texts = [block.removeprefix("data: ") for block in blocks]
    assert texts.count("[DONE]") == 1
    assert texts[-1] == "[DONE]"
    return [json.loads(text) for text in texts[:-1]]


# -------------------------------------------------------------------------------- through the SDK


@pytest.mark.parametrize("continuous", [False, True])
def test_vllm_s_clients_read_choices_and_usage(url: str, continuous: bool) -> None:
    """Text from `choices`, and tokens from the `usage` of the one event that has no `choices`."""
    form = {"stream_include_usage": "True", "stream_continuous_usage_stats": str(continuous)}
    *deltas, done = events_of(post_stream(url, **form))
    texts = [event["choices"][0]["delta"]["content"] for event in deltas]
    assert "".join(texts) == done["text"] == "Hello there. General."
    assert "choices" not in done
    assert done["usage"]["completion_tokens"] == done["usage"]["output_tokens"] > 0
    assert done["usage"]["prompt_tokens"] == done["usage"]["input_tokens"] > 0
    counts = [event["usage"]["completion_tokens"] for event in deltas if "usage" in event]
    assert len(counts) == (len(deltas) if continuous else 0)
    assert counts == sorted(counts)
    assert not continuous or counts[-1] == done["usage"]["completion_tokens"]
    for event in deltas:
        TranscriptionTextDeltaEvent.model_validate(event)
    TranscriptionTextDoneEvent.model_validate(done)


@pytest.mark.parametrize("form", [{}, {"stream_continuous_usage_stats": "true"}])
def test_without_stream_include_usage_events_are_openais_alone(
    url: str, form: dict[str, str]
) -> None:
    *deltas, done = events_of(post_stream(url, **form))
    assert all(set(event) == {"type", "delta"} for event in deltas)
    assert "completion_tokens" not in done["usage"]


def test_logprobs_come_with_their_deltas_and_all_of_them_at_the_end(client: openai.OpenAI) -> None:
    events = list(
        client.audio.transcriptions.create(
            model="demo", file=AUDIO, stream=True, include=["logprobs"]
        )
    )
    tokens = [[one.token for one in event.logprobs or ()] for event in events]
    assert tokens == [[" Hello there."], [" General."], [" Hello there.", " General."]]


def test_the_sdk_raises_what_failed_in_mid_stream(
    client: openai.OpenAI, transcriber: FakeTranscriber
) -> None:
    transcriber.n_updates = 1
    transcriber.error = DeadlineExceededError("the time ran out")
    stream = iter(client.audio.transcriptions.create(model="demo", file=AUDIO, stream=True))
    assert next(stream).type == "transcript.text.delta"
    with pytest.raises(openai.APIError, match="the time ran out") as caught:
        next(stream)
    assert (caught.value.type, caught.value.code) == ("server_error", "deadline_exceeded")


def test_a_bug_in_mid_stream_is_told_without_its_details(
    url: str, transcriber: FakeTranscriber
) -> None:
    transcriber.n_updates = 1
    transcriber.error = RuntimeError("secret detail")
    answer = post_stream(url)
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"] in last["error"]["message"]
    assert "secret" not in answer.text
    assert "[DONE]" not in answer.text


# ----------------------------------------------------------------------- refused before the stream


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AudioTooShortError("short", param="file"), 400),
        (OverloadedError("busy"), 503),
        (DeadlineExceededError("late"), 504),
        (RuntimeError("a bug"), 500),
    ],
)
def test_what_fails_before_audio_was_found_has_its_status(
    url: str, transcriber: FakeTranscriber, error: Exception, status: int, tmp_path: Path
) -> None:
    transcriber.error = error
    answer = post_stream(url)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    if isinstance(error, SplitscribeError):
        assert answer.json()["error"]["code"] == error.code
    if status == 503:
        assert int(answer.headers["retry-after"]) >= 1
    wait_until(lambda: not open_files(tmp_path))


# ------------------------------------------------------------------------------------- on the wire


def test_headers_tell_proxies_to_pass_the_stream_on(url: str) -> None:
    answer = post_stream(url)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["server-timing"].startswith("upload;dur=")
    assert "content-length" not in answer.headers


def test_a_quiet_stream_has_heartbeats_and_a_hang_up_cancels_the_work(
    url: str, transcriber: FakeTranscriber, tmp_path: Path
) -> None:
    transcriber.hold = True
    transcriber.n_updates = 1
    files = {"file": ("a.wav", AUDIO)}
    with httpx.stream("POST", f"{url}{URL}", data=STREAM, files=files, timeout=20) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        comments = [line for line, _ in zip(lines, range(8), strict=False) if line.startswith(":")]
        assert len(comments) > 1
        assert not transcriber.cancelled.is_set()
        assert httpx.get(f"{url}/health").json()["router"]["requests"] == 1
        assert open_files(tmp_path), "the upload lives as long as the work"
    assert transcriber.cancelled.wait(20.0)
    wait_until(lambda: not open_files(tmp_path))
    wait_until(lambda: httpx.get(f"{url}/health").json()["router"]["requests"] == 0)


@pytest.mark.parametrize("form", [MODEL_FORM, STREAM])
def test_a_hang_up_before_the_200_cancels_the_work_too(
    url: str, transcriber: FakeTranscriber, tmp_path: Path, form: dict[str, str]
) -> None:
    transcriber.hold = True  # and finds no audio
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}{URL}", data=form, files={"file": ("a", AUDIO)}, timeout=0.5)
    assert transcriber.cancelled.wait(20.0)
    wait_until(lambda: not open_files(tmp_path))


@pytest.mark.parametrize("response_format", ["json", "text", "srt", "vtt", "verbose_json"])
@pytest.mark.parametrize("texts", [(" Hello there.", " General."), ()])
def test_joined_deltas_are_what_the_whole_answer_says(
    url: str, transcriber: FakeTranscriber, response_format: str, texts: tuple[str, ...]
) -> None:
    transcriber.texts = texts
    events = events_of(post_stream(url, response_format=response_format))
    form = {**MODEL_FORM, "response_format": response_format}
    whole = httpx.post(f"{url}{URL}", data=form, files={"file": ("a", AUDIO)}).text
    joined = "".join(event["delta"] for event in events[:-1])
    assert events[-1]["text"] == joined
    for event in events[:-1]:
        TranscriptionTextDeltaEvent.model_validate(event)
    TranscriptionTextDoneEvent.model_validate(events[-1])
    match response_format:
        case "srt" | "vtt":
            assert joined == whole
        case "text":
            assert f"{joined}\n" == whole
        case _:
            assert joined == json.loads(whole)["text"]


def test_verbose_json_streams_closed_segments_and_ends_with_its_whole_body(url: str) -> None:
    events = events_of(
        post_stream(
            url,
            response_format="verbose_json",
            timestamp_granularities='["word", "segment"]',
        )
    )
    segments = [one for event in events[:-1] for one in event["segments"]]
    done = events[-1]
    assert [segment["id"] for segment in segments] == [0, 1]
    words = [word["word"] for segment in segments for word in segment.pop("words")]
    assert words == [" Hello", " there.", " General."]
    assert done["segments"] == segments
    assert [word["word"] for word in done["words"]] == ["Hello", "there.", "General."]
    assert {"encode", "decode", "total"} <= set(re.findall(r"(\w+);dur=", done["server_timing"]))
    usage = {"type": "duration", "seconds": done["usage"]["seconds"]}  # a stream's has tokens too
    VerboseTranscriptionResponse.model_validate({**done, "usage": usage})


def test_an_event_is_one_line_to_every_reader_of_lines() -> None:
    text = "a\nb\r\x0b\x85\u2028\u2029c"
    writer = EventWriter(TranscriptionParams("m"), lambda timings: "")
    event = writer.delta(Update(text))
    assert event is not None
    assert len(event.decode().strip().splitlines()) == 1
    assert json.loads(event.decode().removeprefix("data: "))["delta"] == text
