"""The load client: what it reads from streams, and how it tells failures apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from benchmark.shared.openai_client import Client, Outcome, Upload, endpoint_of

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


def stream(*events: str) -> Answer:
    body = "".join(f"data: {event}\n\n" for event in events)
    return lambda _: web.Response(text=body, content_type="text/event-stream")


async def test_openai_events_give_text_times_and_tokens() -> None:
    outcome = await outcome_of(
        stream(
            '{"type": "transcript.text.delta", "delta": "Hello"}',
            '{"type": "transcript.text.delta", "delta": " you"}',
            '{"type": "transcript.text.done", "text": "Hello you", "usage": {"output_tokens": 7}}',
            "[DONE]",
        )
    )
    assert (outcome.failure, outcome.text, outcome.output_tokens) == ("", "Hello you", 7)
    assert outcome.ttft is not None
    assert 0 < outcome.ttft <= outcome.latency
    assert len(outcome.itls) == 1


async def test_chunks_of_a_chat_completion_are_read_as_well() -> None:
    outcome = await outcome_of(
        stream(
            '{"choices": [{"delta": {"content": "Hello"}}]}',
            '{"choices": [{"delta": {"content": " you"}}]}',
            '{"choices": [], "usage": {"completion_tokens": 3}}',
            "[DONE]",
        )
    )
    assert (outcome.failure, outcome.text, outcome.output_tokens) == ("", "Hello you", 3)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (stream('{"type": "transcript.text.delta", "delta": "Hel"}'), "stream"),
        (stream('{"error": {"message": "the decoder died"}}'), "stream"),
        (stream("no JSON"), "malformed"),
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


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/audio/transcriptions"]
)
def test_a_url_may_be_the_servers_its_v1_or_the_endpoint(url: str) -> None:
    assert endpoint_of(url) == "http://h:1/v1/audio/transcriptions"
