"""Multipart bodies of every cut, order and size; nothing stays on disk."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive

from cluster.common.errors import (
    AudioTooShortError,
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
)
from router.audio.protocol import as_file
from router.http.bodies import (
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    MAX_FRAMING_BYTES,
    MAX_REFERENCE_BYTES,
    MAX_REFERENCES_BYTES,
    REFERENCES,
)
from router.http.uploads import UploadedForm, check_content_length, receive_form
from tests.support.router_fakes import open_files

LIMIT = 3_000_000
HEADERS = {"content-type": "multipart/form-data; boundary=XX"}
MODEL_PART = ('form-data; name="model"', b"m")
FILE_NAME = 'form-data; name="file"; filename="a.wav"'


def body_of(*parts: tuple[str, bytes]) -> bytes:
    pieces = [
        b"--XX\r\nContent-Disposition: " + disposition.encode() + b"\r\n\r\n" + content + b"\r\n"
        for disposition, content in parts
    ]
    return b"".join(pieces) + b"--XX--\r\n"


class Channel:
    """An ASGI channel with a body cut into pieces."""

    def __init__(self, body: bytes, piece: int = 64 * 1024) -> None:
        self._pieces: Iterator[bytes] = iter(
            [body[start : start + piece] for start in range(0, len(body), piece)]
        )
        self.read_bytes = 0

    async def receive(self) -> dict[str, Any]:
        piece = next(self._pieces, None)
        if piece is not None:
            self.read_bytes += len(piece)
            return {"type": "http.request", "body": piece, "more_body": True}
        return {"type": "http.request", "body": b"", "more_body": False}


def chunks_of(receive: Receive) -> AsyncIterator[bytes]:
    return Request({"type": "http"}, receive).stream()


async def read(
    channel: Channel, folder: Path, headers: dict[str, str] = HEADERS
) -> tuple[UploadedForm, bytes]:
    async with receive_form(headers, chunks_of(channel.receive), max_upload_bytes=LIMIT) as form:
        content = form.path.read_bytes()
        assert form.size_bytes == len(content)
    assert not open_files(folder)
    return form, content


async def refusal(
    body: bytes, folder: Path, headers: dict[str, str] = HEADERS
) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await read(Channel(body), folder, headers)
    assert not open_files(folder)
    return caught.value


@pytest.mark.parametrize("piece", [1, 7, 64 * 1024])
@pytest.mark.parametrize("file_first", [True, False])
async def test_a_body_cut_anywhere_gives_the_same_form(
    piece: int, file_first: bool, tmp_path: Path
) -> None:
    audio = b"\r\n--X\r\n--XY\r\n" + os.urandom(500) + b"\r\n-"
    prompt = ('form-data; name="prompt"', "naïve\r\nline".encode())
    parts = [MODEL_PART, prompt, (FILE_NAME, audio)]
    body = body_of(*(reversed(parts) if file_first else parts))
    form, content = await read(Channel(body, piece), tmp_path)
    assert content == audio
    assert sorted(form.fields) == [("model", "m"), ("prompt", "naïve\r\nline")]
    assert form.filename == "a.wav"


async def test_large_files_are_written_whole(tmp_path: Path) -> None:
    audio = os.urandom(LIMIT)
    _, content = await read(Channel(body_of((FILE_NAME, audio), MODEL_PART)), tmp_path)
    assert content == audio


async def test_one_byte_too_many_ends_the_upload_at_once(tmp_path: Path) -> None:
    body = body_of((FILE_NAME, bytes(LIMIT + 1)), ('form-data; name="prompt"', bytes(500_000)))
    channel = Channel(body)
    with pytest.raises(PayloadTooLargeError) as caught:
        await read(channel, tmp_path)
    assert not open_files(tmp_path)
    assert channel.read_bytes < LIMIT + 100_000, "the rest was not read"
    message = f"Maximum content size limit ({LIMIT}) exceeded ({channel.read_bytes} bytes read)"
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("announced", "length"),
    [("10", 10), (str(LIMIT + 5000), LIMIT + 5000), ("x", None), ("", None)],
)
def test_an_announced_length_within_reach_is_read(announced: str, length: int | None) -> None:
    assert check_content_length({"content-length": announced}, LIMIT) == length


def test_an_announced_length_out_of_reach_is_refused_unread() -> None:
    with pytest.raises(PayloadTooLargeError) as caught:
        check_content_length({"content-length": "99999999"}, LIMIT)
    message = f"Maximum content size limit ({LIMIT}) exceeded (99999999 bytes read)"
    assert caught.value.message == message


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/json"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data"},
        {"content-type": "multipart/form-data; boundary="},
        {"content-type": "multipart/form-data; boundary=" + "x" * 2000},
    ],
)
async def test_only_multipart_with_a_boundary_is_read(
    headers: dict[str, str], tmp_path: Path
) -> None:
    await refusal(body_of(MODEL_PART), tmp_path, headers)


@pytest.mark.parametrize(
    "part",
    [None, ('form-data; name="file"', b"RIFF"), ('form-data; name="file"; filename=""', b"")],
)
async def test_a_missing_or_non_upload_file_is_refused(
    part: tuple[str, bytes] | None, tmp_path: Path
) -> None:
    parts = [MODEL_PART, part] if part else [MODEL_PART]
    error = await refusal(body_of(*parts), tmp_path)
    assert "'file'" in error.message
    assert (error.param, error.code) == (None, None)


async def test_an_empty_file_is_too_short(tmp_path: Path) -> None:
    error = await refusal(body_of(MODEL_PART, (FILE_NAME, b"")), tmp_path)
    assert isinstance(error, AudioTooShortError)
    assert error.param == "file"


FILE_PART = (FILE_NAME, b"a" * 100)
MALFORMED = {
    "two files": body_of(FILE_PART, (FILE_NAME, b"b")),
    "file as field": body_of(FILE_PART, ('form-data; name="model"; filename="m"', b"m")),
    "no name": body_of(FILE_PART, ("form-data", b"m")),
    "not UTF-8": body_of(FILE_PART, ('form-data; name="prompt"', b"\xff\xfe")),
    "long field": body_of(FILE_PART, ('form-data; name="a"', b"x" * (MAX_FIELD_BYTES + 1))),
    "many fields": body_of(
        FILE_PART, *[(f'form-data; name="f{i}"', b"") for i in range(MAX_FIELDS + 1)]
    ),
    "empty": b"",
    "text": b"hello",
    "no end": body_of(FILE_PART)[:-8],
    "cut": body_of(FILE_PART)[:90],
    "other boundary": b"--YY\r\nContent-Disposition: form-data; name=x\r\n\r\n1\r\n--YY--\r\n",
    "many headers": b"--XX\r\n" + b"A: b\r\n" * 1000 + b"\r\n1\r\n--XX--\r\n",
    "bad header": b"--XX\r\n: \r\n\r\n1\r\n--XX--\r\n",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_forms_are_refused(body: bytes, tmp_path: Path) -> None:
    await refusal(body, tmp_path)


async def test_references_have_limits_of_their_own(tmp_path: Path) -> None:
    part = f'form-data; name="{REFERENCES}[]"'
    body = body_of(*4 * [(part, b"x" * 1_000_000)], (FILE_NAME, b"a"))
    form, _ = await read(Channel(body), tmp_path)
    assert [len(text) for _, text in form.fields] == 4 * [1_000_000]
    assert check_content_length({"content-length": str(len(body))}, LIMIT) == len(body)
    error = await refusal(body_of((part, bytes(MAX_REFERENCE_BYTES + 1))), tmp_path)
    assert error.param == f"{REFERENCES}[]"
    many = body_of(*5 * [(part, b"x" * MAX_REFERENCE_BYTES)], (FILE_NAME, b"a"))
    with pytest.raises(
        PayloadTooLargeError, match=f"{MAX_REFERENCES_BYTES} bytes of .known_speaker_references"
    ):
        await read(Channel(many), tmp_path)


async def test_a_list_has_more_items_than_a_form_has_fields(tmp_path: Path) -> None:
    lines = [('form-data; name="lines[]"', b"So it goes.")] * (5 * MAX_FIELDS)
    form, _ = await read(Channel(body_of((FILE_NAME, b"a"), *lines)), tmp_path)
    assert len(form.fields) == len(lines)


async def test_endless_preambles_are_cut_off(tmp_path: Path) -> None:
    body = body_of((FILE_NAME, b"a")) + b"x" * (2 * MAX_FRAMING_BYTES)
    with pytest.raises(PayloadTooLargeError):
        await read(Channel(body), tmp_path)
    assert not open_files(tmp_path)


async def test_a_cancelled_upload_leaves_nothing(tmp_path: Path) -> None:
    reading = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if reading.is_set():
            await asyncio.Event().wait()
        reading.set()
        return {"type": "http.request", "body": body_of((FILE_NAME, b"a"))[:60], "more_body": True}

    async def upload() -> None:
        chunks = chunks_of(receive)
        async with receive_form(HEADERS, chunks, max_upload_bytes=LIMIT):
            raise AssertionError("the body never ended")

    task = asyncio.create_task(upload())
    await reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not open_files(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_is_an_overload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(**_: object) -> io.FileIO:
        return io.FileIO("/dev/full", "w")

    monkeypatch.setattr("router.http.uploads.tempfile.TemporaryFile", full)
    with pytest.raises(OverloadedError) as caught:
        await read(Channel(body_of((FILE_NAME, b"abc"))), tmp_path)
    assert caught.value.retry_after_s is not None
    assert "cannot be stored in /dev" in caplog.text, "an operator reads which disk is full"


async def test_what_a_worker_opens_has_no_name_that_a_killed_router_could_leave(
    tmp_path: Path,
) -> None:
    channel = Channel(body_of((FILE_NAME, b"abc")))
    async with AsyncExitStack() as files:
        paths = [await files.enter_async_context(as_file(one)) for one in (b"one", b"two")]
        async with receive_form(
            HEADERS, chunks_of(channel.receive), max_upload_bytes=LIMIT
        ) as form:
            seen = subprocess.check_output(["cat", form.path, *paths])  # noqa: ASYNC221
            assert seen == b"abconetwo"
            assert not list(tmp_path.iterdir())  # noqa: ASYNC240
            assert len(open_files(tmp_path)) == 3
    assert not open_files(tmp_path)
