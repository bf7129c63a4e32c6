"""The load client: what it reads from streams, and how it tells failures apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from benchmark.shared.openai_client import Client, Outcome, Upload

UPLOAD = Upload.of(b"RIFF", "a.wav", {"model": "m"})
Answer = Callable[[web.Request], web.StreamResponse]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        return answer(request)

    app = web.Application()
    app.router.add_post("/v1/audio/transcriptions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def outcome_of(answer: Answer, timeout_s: float = 10.0) -> Outcome:
    async with answering(answer) as url, Client(url, timeout_s=timeout_s) as client:
        return await client.send(UPLOAD)


async def test_a_json_answer_gives_its_text_and_all_of_it() -> None:
    outcome = await outcome_of(lambda _: web.json_response({"text": "Hello", "language": "en"}))
    assert (outcome.failure, outcome.text, outcome.answer["language"]) == ("", "Hello", "en")
    assert outcome.latency > 0


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (lambda _: web.Response(text="no JSON", content_type="application/json"), "malformed"),
        (lambda _: web.json_response({"error": {"message": "busy"}}, status=503), "503"),
        (lambda _: web.json_response({"no": "text"}), "malformed"),
    ],
)
async def test_failures_are_told_apart(answer: Answer, failure: str) -> None:
    outcome = await outcome_of(answer)
    assert outcome.failure == failure
    assert outcome.error


async def test_a_server_that_does_not_answer_is_a_timeout() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Client(url, timeout_s=0.2) as client:
            assert (await client.send(UPLOAD)).failure == "timeout"


async def test_a_text_answer_is_the_text() -> None:
    outcome = await outcome_of(lambda _: web.Response(text="just words"))
    assert outcome.text == "just words"
