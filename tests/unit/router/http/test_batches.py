"""`/v1/files` and `/v1/batches` behind real HTTP, driven by OpenAI's Python SDK."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from router.batches.service import PIECE_BYTES
from router.http.keys import KeyRing
from router.http.routes import create_app
from router.transcript import Channel
from tests.support.batches import DEADLINE_S, ENDPOINT, Counter, Desk, Hands, desk, line, served
from tests.support.router_fakes import (
    FakeTranscriber,
    client_of,
    error_of,
    make_registry,
    make_settings,
)
from tests.support.waiting import eventually

WAV = {"url": "data:audio/wav;base64,AAAA"}
AUDIO = os.urandom(2 * PIECE_BYTES + 12_345)


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk(tmp_path) as opened:
        yield opened


@pytest.fixture
async def server(at: Desk) -> AsyncIterator[Counter]:
    async with served(at) as counter:
        yield counter


@pytest.fixture
def client(server: Counter) -> openai.AsyncOpenAI:
    return server.client()


async def create(client: openai.AsyncOpenAI, file_id: str, **fields: Any) -> Batch:
    return await client.batches.create(
        input_file_id=file_id,
        endpoint=ENDPOINT,  # type: ignore[arg-type]  # the SDK does not list audio
        completion_window="24h",
        **fields,
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Batch:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "cancelled", "expired"):
                return batch
            await asyncio.sleep(0.01)


async def test_a_file_comes_back_as_it_was_sent(client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(
        file=("größe.bin", AUDIO),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.filename, file.bytes, file.purpose) == ("größe.bin", len(AUDIO), "user_data")
    assert file.expires_at == file.created_at + 3600
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == AUDIO
    assert (await client.files.wait_for_processing(file.id)).id == file.id
    deleted = await client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    for asked in (client.files.retrieve, client.files.content):
        with pytest.raises(openai.NotFoundError):
            await asked(file.id)


async def test_lists_come_page_by_page(client: openai.AsyncOpenAI) -> None:
    upload = partial(client.files.create, purpose="user_data")
    ids = [(await upload(file=(f"{i}.bin", b"x"))).id for i in range(5)]
    batch_file = await client.files.create(file=("b.jsonl", b"x"), purpose="batch")
    found = await client.files.list(limit=2, order="asc", purpose="user_data")
    assert [file.id for file in found.data] == ids[:2]
    assert [file.id async for file in found] == ids
    assert [file.id async for file in client.files.list()] == [batch_file.id, *reversed(ids)]
    with pytest.raises(openai.BadRequestError, match="after"):
        await client.files.list(after="file-none")
    with pytest.raises(openai.BadRequestError):
        await client.files.list(limit=0)


@pytest.mark.parametrize(
    ("endpoint", "fields", "task", "known"),
    [
        ("/v1/audio/translations", {}, "translate", ()),
        ("/v1/audio/alignments", {"text": "One.\nTwo."}, "transcribe", ("One.", "Two.")),
    ],
)
async def test_a_batch_of_other_endpoints(
    client: openai.AsyncOpenAI,
    at: Desk,
    endpoint: str,
    fields: dict[str, str],
    task: str,
    known: tuple[str, ...],
) -> None:
    lines = [
        line("one", endpoint, url="data:audio/wav;base64,UklGRg==", **fields),
        line("two", endpoint, url="data:audio/wav;base64,UklGRg==", temperature=9, **fields),
    ]
    file = await client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
    )
    batch = await ended(client, batch.id)
    assert batch.endpoint == endpoint
    assert list(await results(client, batch.output_file_id)) == ["one"]
    errors = await results(client, batch.error_file_id)
    assert errors["two"]["response"]["body"]["error"]["param"] == "temperature"
    assert [(one.task, one.known_lines) for one in at.transcriber.params] == [(task, known)]


async def test_a_batch_runs_to_its_end(client: openai.AsyncOpenAI, at: Desk) -> None:
    audio = await client.files.create(file=("a.wav", b"RIFF"), purpose="user_data")
    lines = [
        line("one", file_id=audio.id),
        line("two", file_url="data:audio/wav;base64,UklGRg=="),
        line("three", input_audio={"data": "UklGRg==", "format": "wav"}, response_format="srt"),
        line("bad", file_id=audio.id, temperature=9),
        line("gone", file_id="file-../../etc/passwd"),
        line("stream", file_id=audio.id, stream=True),
    ]
    file = await client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    batch = await create(client, file.id, metadata={"who": "me"})
    assert batch.status == "validating"
    assert batch.metadata == {"who": "me"}
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.model == "whisper-1"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (6, 3, 3)
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    output = await results(client, batch.output_file_id)
    assert list(output) == ["one", "two", "three"]
    for one in output.values():
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        assert one["id"].startswith("batch_req_")
        assert one["response"]["request_id"].startswith("req_")
    assert output["one"]["response"]["body"]["text"] == "Hello there. General."
    assert output["one"]["response"]["body"]["usage"]["type"] == "duration"
    assert output["three"]["response"]["body"].startswith("1\n00:00:00,000")
    errors = await results(client, batch.error_file_id)
    refused = {name: one["response"] for name, one in errors.items()}
    assert refused["bad"]["status_code"] == 400
    assert refused["bad"]["body"]["error"]["param"] == "temperature"
    assert refused["gone"]["status_code"] == 404
    assert refused["gone"]["body"]["error"]["param"] == "file_id"
    assert refused["stream"]["body"]["error"]["param"] == "stream"
    assert at.transcriber.uploads == [b"RIFF"] * 3
    [listed] = [one async for one in client.batches.list()]
    assert listed == batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """A result file's lines by their custom_id, in its order."""
    assert file_id is not None
    assert (await client.files.retrieve(file_id)).purpose == "batch_output"
    content = (await client.files.content(file_id)).text
    return {one["custom_id"]: one for one in map(json.loads, content.splitlines())}


async def test_an_input_with_mistakes_fails_with_their_lines(client: openai.AsyncOpenAI) -> None:
    lines = [
        line("a", file_id="f"),
        b"{broken\n",
        b"\n",
        line("a", file_id="f"),
        line("b", "/v1/chat/completions", file_id="f"),
        line("c", file_id="f", model="gpt-9"),
        line("d"),
        line("e", file_id="f", url="https://x"),
    ]
    file = await client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    batch = await ended(client, (await create(client, file.id)).id)
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(one.line, one.code, one.param) for one in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_url", "url"),
        (6, "model_not_found", "body.model"),
        (7, "invalid_audio_source", "body"),
        (8, "invalid_audio_source", "body.url"),
    ]
    assert "gpt-9" in str(batch.errors.data[3].message)


async def test_what_is_asked_for_wrongly_is_refused(client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=("a.wav", b"RIFF"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose") as refused:
        await create(client, file.id)
    assert refused.value.code == "invalid_purpose"
    with pytest.raises(openai.NotFoundError):
        await create(client, "file-none")
    for field, value in (("endpoint", "/v1/chat/completions"), ("completion_window", "1h")):
        body = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/batches", body={**body, field: value}, cast_to=object)
        assert refused.value.param == field
    for extra in ({"metadata": {"k" * 65: "v"}}, {"speed": 2}, {"webhook_url": "https://x"}):
        with pytest.raises(openai.BadRequestError):
            await create(client, file.id, extra_body=extra)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("a", b"x"), purpose="vision board")  # type: ignore[arg-type]
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("a", b""), purpose="batch")
    assert refused.value.code == "empty_file"
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_none")


async def test_cancelled_in_the_middle_it_keeps_what_was_done(
    client: openai.AsyncOpenAI, at: Desk
) -> None:
    audio = await client.files.create(file=("a.wav", b"RIFF"), purpose="user_data")
    lines = b"".join(line(f"l{i}", file_id=audio.id) for i in range(8))
    file = await client.files.create(file=("in.jsonl", lines), purpose="batch")
    at.transcriber.hold = True
    batch = await create(client, file.id)
    await asyncio.to_thread(at.transcriber.started.wait, DEADLINE_S)
    with pytest.raises(openai.ConflictError, match=batch.id):
        await client.files.delete(file.id)
    batch = await client.batches.cancel(batch.id)
    assert batch.status == "cancelling"
    batch = await ended(client, batch.id)
    assert batch.status == "cancelled"
    assert None not in (batch.cancelling_at, batch.cancelled_at)
    assert at.transcriber.cancelled.is_set()
    assert batch.output_file_id is None
    errors = await results(client, batch.error_file_id)
    assert len(errors) == 8
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    assert (await client.batches.cancel(batch.id)).status == "cancelled"
    await client.files.delete(file.id)


async def test_another_key_sees_nothing(at: Desk) -> None:
    async with served(at, make_settings(api_key=("one", "two"))) as server:
        mine, other = server.client("one"), server.client("two")
        file = await mine.files.create(file=("in.jsonl", line("a", url="x")), purpose="batch")
        batch = await create(mine, file.id)
        await ended(mine, batch.id)
        with pytest.raises(openai.NotFoundError):
            await create(other, file.id)
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(file.id)  # type: ignore[operator]
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        assert (await other.files.list()).data == []
        assert (await other.batches.list()).data == []
        with pytest.raises(openai.AuthenticationError):
            await server.client("three").files.list()
        reads = await other.files.create(file=("b", line("a", file_id=file.id)), purpose="batch")
        batch = await ended(other, (await create(other, reads.id)).id)
        [error] = (await results(other, batch.error_file_id)).values()
        assert error["response"]["status_code"] == 404


async def test_lines_count_for_the_key_of_their_batch(tmp_path: Path) -> None:
    hands = Hands()
    limits = make_settings(api_key=("ann one", "bob two"), max_audio_hours_per_day=0.004)  # 14.4 s
    async with desk(tmp_path, hands=hands) as at, served(at, limits) as server:
        at.transcriber.channels = (Channel(1, "Ann"), Channel(2, "Bob"))  # each of them counts
        client, other = server.client("one"), server.client("two")
        lines = line("a", **WAV) + line("b", **WAV) + line("c", url="x")
        file = await client.files.create(file=("in.jsonl", lines), purpose="batch")
        hands.wall_s = time.time()
        batch = await ended(client, (await create(client, file.id)).id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 2
        usage = await client.get("/organization/usage/audio_transcriptions", cast_to=dict)
        (day,) = usage["data"]
        (used,) = day["results"]
        assert (used["seconds"], used["num_model_requests"], used["api_key_id"]) == (34, 4, "ann")
        with pytest.raises(openai.RateLimitError, match="hours of audio"):
            await create(client, file.id)
        file = await other.files.create(file=("in.jsonl", lines), purpose="batch")
        await create(other, file.id)
        hands.pass_s(40 * 86_400)
        await at.service.clean()
        assert await at.service.usage(KeyRing(("one",)).owner_digest(0).hex()) == []


async def test_an_upload_over_the_limit_is_cut_off(at: Desk, tmp_path: Path) -> None:
    async with served(at, max_file_bytes=100_000) as server:
        client = server.client()
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=("a", b"x" * 100_001), purpose="user_data")
        assert refused.value.status_code == 413
        await client.files.create(file=("a", b"x" * 100_000), purpose="user_data")
    assert len(list((tmp_path / "uploads").iterdir())) == 0
    assert len(list((tmp_path / "files").iterdir())) == 1


async def test_where_it_is_off_it_says_which_setting_turns_it_on() -> None:
    app = create_app(make_registry(FakeTranscriber()), make_settings())
    assert not [path for path in app.openapi()["paths"] if "files" in path or "batch" in path]
    async with client_of(app) as client:
        for method, path in (("GET", "files"), ("POST", "batches"), ("GET", "files/x/content")):
            error = error_of(await client.request(method, f"/v1/{path}"))
            assert error["code"] == "batches_not_enabled"
            assert "batches.folder" in error["message"]


async def test_a_client_that_leaves_in_mid_upload_leaves_nothing(
    server: Counter, tmp_path: Path
) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        yield b"x" * (2 * PIECE_BYTES)
        await eventually(lambda: any((tmp_path / "uploads").iterdir()))
        raise ConnectionError("gone")

    async with httpx.AsyncClient() as client:
        with pytest.raises(ConnectionError):
            await client.post(
                f"{server.url}/v1/files",
                content=half(),
                headers={"content-type": "multipart/form-data; boundary=b"},
            )
    await eventually(lambda: not any((tmp_path / "uploads").iterdir()))
    assert list((tmp_path / "files").iterdir()) == []
