"""OpenAI's Python SDK, unchanged, against a running cluster: uploads, streams, failures.

`tests/e2e/works_with/test_withdrawn.py` has the formats.
"""

from __future__ import annotations

import asyncio
import io
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from cluster.demo.samples import sample_path
from router.http.admission import BYTES_PER_AUDIO_S
from tests.e2e.conftest import Server, wait_until
from tests.support.audio.speech import pcm_of, wav_of
from tests.support.in_process import in_process_server

SHORT = sample_path("short")
TRANSLATES = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as the SDK does it


class Pipe(io.RawIOBase):
    """No length and no way back: the SDK can only send it in chunks."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._content.readinto(buffer)


UPLOADS: dict[str, Callable[[], Any]] = {
    "path": lambda: SHORT,
    "open file": lambda: SHORT.open("rb"),
    "bytes": SHORT.read_bytes,
    "named bytes": lambda: ("speech.flac", SHORT.read_bytes()),
    "named and typed bytes": lambda: ("speech", SHORT.read_bytes(), "audio/flac"),
    "a wrong name and type": lambda: ("speech.mp3", SHORT.read_bytes(), "audio/mpeg"),
    "buffer": lambda: io.BytesIO(SHORT.read_bytes()),
    "pipe": lambda: ("speech.flac", io.BufferedReader(Pipe(SHORT.read_bytes()))),
}


@pytest.fixture(scope="module")
def said(server: Server) -> str:
    """What the short recording reads as."""
    text = server.client().audio.transcriptions.create(model="whisper-1", file=SHORT).text
    assert len(text.split()) > 8
    return text


@pytest.mark.parametrize("kind", UPLOADS)
def test_whatever_the_file_is_given_as_its_text_is_the_same(
    server: Server, said: str, kind: str
) -> None:
    client = server.client(max_retries=0)
    assert client.audio.transcriptions.create(model="whisper-1", file=UPLOADS[kind]()).text == said


async def test_async_calls_side_by_side_get_their_own_texts(server: Server, said: str) -> None:
    async with server.async_client() as client:
        create = client.audio.transcriptions.create
        medium = (await create(model="whisper-1", file=sample_path("medium"))).text
        calls = (
            create(model="whisper-1", file=sample_path(name)) for name in ("short", "medium") * 2
        )
        texts = [answer.text for answer in await asyncio.gather(*calls)]
    assert texts == [said, medium] * 2


@pytest.mark.parametrize(
    "strategy",
    ["auto", {"type": "server_vad", "threshold": 0.4, "silence_duration_ms": 300}],
    ids=["auto", "server_vad"],
)
def test_a_chunking_strategy_is_honoured(server: Server, said: str, strategy: Any) -> None:
    """A short recording has no window to cut, so that its text stays."""
    answer = server.client().audio.transcriptions.create(
        model="whisper-1", file=SHORT, chunking_strategy=strategy
    )
    assert answer.text == said


def deltas_of(events: list[Any]) -> str:
    """The joined deltas, after checking that the stream ends as it should."""
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[-1].type == "transcript.text.done"
    text = "".join(event.delta for event in events[:-1])
    assert text == events[-1].text
    return text


def test_a_stream_can_be_iterated(server: Server, said: str) -> None:
    stream = server.client().audio.transcriptions.create(
        model="whisper-1", file=SHORT, stream=True, include=["logprobs"]
    )
    events = list(stream)
    assert deltas_of(events) == said
    streamed = [one.logprob for event in events[:-1] for one in event.logprobs or ()]
    assert streamed == [one.logprob for one in events[-1].logprobs]


async def test_an_async_stream_can_be_iterated(server: Server, said: str) -> None:
    async with server.async_client() as client:
        stream = await client.audio.transcriptions.create(
            model="whisper-1", file=SHORT, stream=True
        )
        assert deltas_of([event async for event in stream]) == said


def test_with_streaming_response_gives_the_lines_as_they_come(server: Server, said: str) -> None:
    create = server.client().audio.transcriptions.with_streaming_response.create
    with create(model="whisper-1", file=SHORT, stream=True) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in raw.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    with create(model="whisper-1", file=SHORT, response_format="text") as raw:
        assert raw.read().decode().strip() == said


def test_raw_responses_have_an_id_and_the_time_of_each_stage(server: Server, said: str) -> None:
    create = server.client().audio.transcriptions.with_raw_response.create
    ids = set()
    for _ in range(2):
        raw = create(model="whisper-1", file=SHORT)
        assert raw.parse().text == said
        assert raw.headers["x-request-id"] == raw.request_id
        ids.add(raw.request_id)
        stages = [part.split(";")[0] for part in raw.headers["server-timing"].split(", ")]
        assert stages == ["upload", "audio", "queue", "encode", "transfer", "decode", "total"]
    assert len(ids) == 2


@TRANSLATES
def test_the_bundled_model_has_one_language_and_translates_nothing(server: Server) -> None:
    audio = server.client().audio
    with pytest.raises(openai.BadRequestError, match="does not support the language 'de'"):
        audio.transcriptions.create(model="whisper-1", file=SHORT, language="de")
    with pytest.raises(openai.BadRequestError, match="cannot translate"):
        audio.translations.create(model="whisper-1", file=SHORT)


def test_models_are_listed_and_found_by_names_with_a_slash(server: Server) -> None:
    client = server.client()
    (name,) = [model.id for model in client.models.list()]
    assert client.models.retrieve(name).object == "model"
    assert client.models.retrieve(f"openai/{name}").id == f"openai/{name}"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("openai/whisper-99")
    assert missing.value.code == "model_not_found"


def test_a_refusal_says_what_is_wrong_and_is_not_tried_again(server: Server) -> None:
    sent: list[httpx.Request] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    create = server.client(http_client=http, max_retries=2).audio.transcriptions.create
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="whisper-1", file=SHORT, temperature=7)
    assert refused.value.param == "temperature"
    assert "from 0 to 1" in str(refused.value)
    assert refused.value.request_id
    with pytest.raises(openai.NotFoundError):
        create(model="whisper-99", file=SHORT, stream=True)
    with pytest.raises(openai.BadRequestError):
        create(model="whisper-1", file=b"no audio", stream=True)
    assert len(sent) == 3


def test_a_failure_in_mid_stream_is_an_error_and_no_short_text(server: Server, said: str) -> None:
    """The file turns to noise behind its first window, which nobody can know before."""
    damaged = bytearray(sample_path("long").read_bytes())
    at = int(0.7 * len(damaged))
    damaged[at : at + 20_000] = bytes(20_000)
    client = server.client(max_retries=0)
    stream = client.audio.transcriptions.create(
        model="whisper-1", file=("talk.flac", bytes(damaged)), stream=True
    )
    received: list[Any] = []
    with pytest.raises(openai.APIError) as failure:
        received.extend(stream)  # keeps what came before the error
    assert [event.type for event in received] == ["transcript.text.delta"] * len(received)
    assert received
    assert failure.value.code == "audio_truncated"
    assert client.audio.transcriptions.create(model="whisper-1", file=SHORT).text == said


def test_leaving_a_stream_frees_everything(server: Server) -> None:
    stream = server.client().audio.transcriptions.create(
        model="whisper-1", file=sample_path("long"), stream=True
    )
    with stream:
        assert next(iter(stream)).type == "transcript.text.delta"
    wait_until(server.is_idle, 60, "every window of the request is gone")


@contextmanager
def half_a_request(url: str, length: int) -> Iterator[Callable[[], None]]:
    """A client that sends a file of `length` bytes without its last one. Yields its hang-up."""
    head = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.sendall(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
            b"Authorization: Bearer key\r\n"
            b"Content-Type: multipart/form-data; boundary=XX\r\n"
            b"Content-Length: %d\r\n\r\n" % (len(head) + length)
        )
        connection.sendall(head + bytes(length - 1))
        arrived_s = 0.9 * length / BYTES_PER_AUDIO_S

        def is_in() -> bool:
            router: dict[str, float] = httpx.get(f"{url}/health").json()["router"]
            return router["requests"] == 1 and router["pending_audio_s"] > arrived_s

        wait_until(is_in, 30, "it is in")
        yield connection.close


@pytest.mark.parametrize(
    ("limit", "status"),
    [
        pytest.param({"api_key": "key", "max_requests_per_key": 1}, 429, id="one at a time"),
        pytest.param({"max_pending_audio_s": 100}, 429, id="overload", marks=pytest.mark.slow),
    ],
)
def test_the_sdk_comes_back_when_it_was_told_to(limit: dict[str, Any], status: int) -> None:
    """Refused while another request runs, it waits as long as Retry-After says, and succeeds."""
    answers: list[tuple[int, str | None, float]] = []
    tries: list[str] = []

    with in_process_server(**limit) as url, half_a_request(url, 1_500_000) as hang_up:

        def seen(answer: httpx.Response) -> None:
            tries.append(answer.request.headers["x-stainless-retry-count"])
            answers.append(
                (answer.status_code, answer.headers.get("retry-after"), time.monotonic())
            )
            hang_up()

        http = openai.DefaultHttpxClient(event_hooks={"response": [seen]})
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", http_client=http, max_retries=3)
        content = wav_of(pcm_of("short"))
        assert client.audio.transcriptions.create(model="whisper-1", file=content).text

    assert [answer[0] for answer in answers] == [status, 200]
    assert tries == ["0", "1"]
    (_, told_s, refused_s), (_, _, answered_s) = answers
    assert told_s is not None
    assert answered_s - refused_s >= float(told_s)
