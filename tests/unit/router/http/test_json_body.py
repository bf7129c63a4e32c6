"""JSON bodies with base64 of every cut and spelling: the same audio and fields as of a form."""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.common.errors import (
    AudioTooShortError,
    InvalidAudioError,
    InvalidRequestError,
    PayloadTooLargeError,
)
from router.api.documents import MAX_DEPTH, MAX_VALUES, PIECE, base64_pieces, decoded, read_json
from router.http.bodies import MAX_FIELD_BYTES, MAX_FIELDS, MAX_FRAMING_BYTES, read_document
from router.http.uploads import check_content_length
from tests.support.router_fakes import (
    AUDIO,
    LIMIT,
    URL,
    FakeTranscriber,
    error_of,
    open_files,
    post,
)

ENCODED = base64.b64encode(AUDIO).decode()
DOCUMENT = {"model": "whisper-1", "input_audio": {"data": ENCODED, "format": "wav"}}
PLACE = "THE-AUDIO"


def read(body: bytes) -> tuple[bytes, dict[str, str]]:
    fields, text = read_document(body)
    return b"".join(decoded(text, "input_audio.data")), dict(fields)


def refusal(body: bytes | dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        read(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


def with_audio(text: str, **fields: Any) -> bytes:
    """A document whose audio is spelt as `text`, between fields that look like it."""
    document = {
        'a "name" {': [{"data": "{[,:"}, "\\"],
        "input_audio": {"format": "wav", "data": PLACE},
        "prompt": 'say "input_audio": {"data": "no"}',
        **fields,
    }
    return json.dumps(document).replace(PLACE, text).encode()


SPELLINGS = {
    "plain": lambda text: text,
    "slashes escaped, as PHP does": lambda text: text.replace("/", "\\/"),
    "plus escaped, as .NET does": lambda text: text.replace("+", "\\u002B"),
    "in lines": lambda text: "\\r\\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
    "a data URL": lambda text: f"data:audio/wav;base64,{text}",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_audio_of_every_length_and_spelling_arrives_whole(spelling: str) -> None:
    for n_bytes in (1, 2, 3, 4, 100, 1000, 1_500_000, 1_500_001):
        audio = os.urandom(n_bytes)
        text = SPELLINGS[spelling](base64.b64encode(audio).decode())
        content, fields = read(with_audio(text, temperature=0.5))
        assert content == audio
        assert fields["prompt"] == 'say "input_audio": {"data": "no"}'
        assert fields["temperature"] == "0.5"


async def test_a_limit_on_audio_is_kept_to_the_byte(client: httpx.AsyncClient) -> None:
    for n_bytes, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        audio = {"data": base64.b64encode(bytes(n_bytes)).decode()}
        answer = await client.post(URL, json={**DOCUMENT, "input_audio": audio})
        assert answer.status_code == status


def test_all_that_is_not_audio_is_bounded() -> None:
    long = with_audio(ENCODED, prompt="x" * MAX_FRAMING_BYTES)
    with pytest.raises(PayloadTooLargeError, match=rf"{MAX_FRAMING_BYTES} bytes .* in a form"):
        read(long)
    assert refusal(with_audio(ENCODED, prompt="x" * (MAX_FIELD_BYTES + 1))).param == "prompt"
    fields = {f"field{i}": 1 for i in range(MAX_FIELDS)}
    assert "more than" in refusal(with_audio(ENCODED, **fields)).message
    assert "nested" in refusal(b"[" * (MAX_DEPTH + 1)).message
    assert "values" in refusal(b"[" + b"[]," * MAX_VALUES + b"[]]").message
    with pytest.raises(PayloadTooLargeError):
        read(with_audio(ENCODED, junk=[[]] * MAX_FRAMING_BYTES))


@pytest.mark.parametrize("unit", ['\\"', '"', '"a",', "\\\\", "]", "{}"])
def test_bounds_are_checked_without_walking_in_circles(unit: str) -> None:
    """A mebibyte of quotes and escapes, the last of them open."""
    with pytest.raises((InvalidRequestError, PayloadTooLargeError)):
        read(b'{"a": "' + unit.encode() * (MAX_FRAMING_BYTES // len(unit) - 10))


@pytest.mark.parametrize("letters", [b"A", b"\\/"])
def test_a_long_text_is_copied_a_few_times_at_most(letters: bytes) -> None:
    """Some are 64 MiB, and several are read at once."""
    content = b'{"a": 1, "audio": "%b"}' % (letters * (8_000_000 // len(letters)))
    tracemalloc.start()
    try:
        document = read_json(content, 1000, ("audio",))
        pieces = sum(map(len, base64_pieces(document["audio"])))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pieces == len(document["audio"]) // 4 * 3
    assert most_bytes < (1.5 if letters == b"A" else 3.5) * len(content)


@pytest.mark.parametrize("between", ["", " ", "\r\n" * 100])
def test_base64_in_lines_of_any_length_is_read_a_piece_at_a_time(between: str) -> None:
    """Each line would else become an object of its own: 20 bytes of memory of each that came."""
    text = between.join(["AA"] * 500_000)
    tracemalloc.start()
    try:
        n_bytes = sum(map(len, decoded(text, "file_url")))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_bytes == 750_000
    assert most_bytes < 4 * PIECE


def test_a_length_that_no_body_within_the_limit_has_is_refused_before_it_is_read() -> None:
    headers = {"content-type": "application/json", "content-length": str(4 * LIMIT // 3 + 4)}
    assert check_content_length(headers, LIMIT) == 4 * LIMIT // 3 + 4
    with pytest.raises(PayloadTooLargeError):
        check_content_length({**headers, "content-length": str(2 * LIMIT + 2**20)}, LIMIT)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"", None, "not a JSON document"),
        (b"{", None, "not a JSON document"),
        (json.dumps(DOCUMENT).encode()[:-9], None, "not a JSON document"),
        (b"[1]", None, "must be a JSON object"),
        (b'{"model": NaN}', None, "not a number of JSON"),
        (b'{"prompt": "\\ud800"}', None, "not a JSON document"),
        (b"\xff\xfe{}", None, "not a JSON document"),
        ({"model": "m"}, "input_audio", "no audio was sent"),
        ({"model": "m", "input_audio": ENCODED}, "input_audio", "must be an object of 'data'"),
        ({"input_audio": {"format": "wav"}}, "input_audio", "no audio was sent"),
        ({"input_audio": {"data": {"data": "AAAA"}}}, "input_audio", "no audio was sent"),
        ({"x": {"data": ENCODED}, "input_audio": {}}, "input_audio", "no audio was sent"),
        ({"input_audio": {"data": ""}}, "input_audio.data", "is empty"),
        ({"input_audio": {"data": "AAA"}}, "input_audio.data", "the end is missing"),
        ({"input_audio": {"data": "AA=A"}}, "input_audio.data", "not base64"),
        ({"input_audio": {"data": "AA==AAAA"}}, "input_audio.data", "not base64"),
        ({"input_audio": {"data": "é" * 8}}, "input_audio.data", "not base64"),
        ({"input_audio": {"data": "data:audio/wav,AAAA"}}, "input_audio.data", "data URL"),
        ({"input_audio": {"data": "AAAA", "url": "http://x"}}, "input_audio.url", "unknown"),
        ({"input_audio": {"data": "AAAA", "format": 3}}, "input_audio.format", "text"),
        ({"input_audio": {"data": "AAAA", "format": "pcm16"}}, "input_audio.format", "wav"),
        (b'{"input_audio":{"data":"AAAA","data":"AAAA"}}', "input_audio.data", "more than once"),
        (b'{"model":"a","model":"b","input_audio":{"data":"AAAA"}}', "model", "more than once"),
        (b'{"\\ud800":1,"\\ud800":2,"input_audio":{"data":"AAAA"}}', "\\ud800", "more than once"),
        ({**DOCUMENT, "prompt": ["a"]}, "prompt", "must be one value"),
        ({**DOCUMENT, "language": {"a": 1}}, "language", "must be one value"),
    ],
)
def test_what_is_wrong_is_named(body: bytes | dict[str, Any], param: str, message: str) -> None:
    error = refusal(body)
    assert (error.param, error.status) == (param, 400)
    assert message in error.message


def test_an_empty_audio_is_too_short() -> None:
    with pytest.raises(AudioTooShortError):
        read(b'{"input_audio": {"data": ""}}')


async def test_a_document_is_answered_as_the_form_with_the_same_fields(
    client: httpx.AsyncClient, transcriber: FakeTranscriber, tmp_path: Path
) -> None:
    form = {
        "model": "whisper-1",
        "language": "de",
        "temperature": "0.5",
        "response_format": "verbose_json",
        "timestamp_granularities[]": ["word", "segment"],
        "chunking_strategy[type]": "server_vad",
        "chunking_strategy[threshold]": "0.25",
        "seed": "7",
        "prompt": "",
    }
    document = {
        **DOCUMENT,
        "language": "de",
        "temperature": 0.5,
        "response_format": "verbose_json",
        "timestamp_granularities": ["word", "segment"],
        "chunking_strategy": {"type": "server_vad", "threshold": 0.25},
        "seed": 7,
        "prompt": None,
    }
    sent = await client.post(URL, data=form, files={"file": ("a.wav", AUDIO)})
    asked = await client.post(URL, json=document)
    assert asked.status_code == sent.status_code == 200
    assert asked.json() == sent.json()
    first, second = transcriber.params
    assert first == second
    assert transcriber.uploads == [AUDIO, AUDIO]
    assert not open_files(tmp_path), "nothing stays on disk"


async def test_an_error_of_the_audio_names_it_as_the_client_does(
    client: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    transcriber.error = InvalidAudioError("no sound in it", param="file")
    assert error_of(await client.post(URL, json=DOCUMENT))["param"] == "input_audio"
    transcriber.error = InvalidAudioError("no sound in it", param="file")
    assert error_of(await post(client))["param"] == "file"
