"""The load client: what it reads from answers, and how it tells failures apart."""

from __future__ import annotations

import pytest

from benchmark.shared.openai_client import Client, Outcome, Upload
from tests.support.http_host import Answer, Came, Host, http_host

UPLOAD = Upload.of(b"RIFF", "a.wav", {"model": "m"})


def json_answer(body: bytes, status: int = 200) -> Answer:
    return Answer(status, body, {"Content-Type": "application/json"})


async def outcome_of(answer: Answer) -> Outcome:
    with http_host(lambda *_: answer) as host:
        async with Client(host.url) as client:
            return await client.send(UPLOAD)


async def test_a_json_answer_gives_its_text_and_all_of_it() -> None:
    outcome = await outcome_of(json_answer(b'{"text": "Hello", "language": "en"}'))
    assert (outcome.failure, outcome.text, outcome.answer["language"]) == ("", "Hello", "en")
    assert outcome.latency > 0


async def test_a_text_answer_is_the_text() -> None:
    outcome = await outcome_of(Answer(200, b"just words", {"Content-Type": "text/plain"}))
    assert (outcome.failure, outcome.text) == ("", "just words")


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (json_answer(b"no JSON"), "malformed"),
        (json_answer(b'{"error": {"message": "busy"}}', 503), "503"),
        (json_answer(b'{"no": "text"}'), "malformed"),
    ],
)
async def test_failures_are_told_apart(answer: Answer, failure: str) -> None:
    outcome = await outcome_of(answer)
    assert outcome.failure == failure
    assert outcome.error


async def test_a_server_that_does_not_answer_is_a_timeout() -> None:
    def hang(_: Came, host: Host) -> Answer:
        host.released.wait(60)
        return Answer()

    with http_host(hang) as host:
        async with Client(host.url, timeout_s=0.2) as client:
            assert (await client.send(UPLOAD)).failure == "timeout"
