"""Every failure, ours or the framework's, in OpenAI's envelope with the right status."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.common.errors import (
    AudioTooShortError,
    CrowdedError,
    DeadlineExceededError,
    InvalidAudioError,
    OverloadedError,
    PeerLostError,
    RateLimitError,
    SplitscribeError,
)
from router.http.routes import create_app
from tests.support.router_fakes import (
    AUDIO,
    LIMIT,
    MODEL_FORM,
    URL,
    FakeTranscriber,
    client_of,
    error_of,
    make_registry,
    make_settings,
    post,
)


@pytest.mark.parametrize(
    ("form", "status", "param", "code"),
    [
        ({"model": "whisper-9"}, 404, None, "model_not_found"),
        ({"language": "klingon"}, 400, "language", "invalid_language_format"),
    ],
)
async def test_a_form_that_cannot_be_served_never_reaches_the_pipeline(
    form: dict[str, Any],
    status: int,
    param: str | None,
    code: str | None,
    client: httpx.AsyncClient,
    transcriber: FakeTranscriber,
) -> None:
    answer = await post(client, **form)
    error = error_of(answer)
    assert answer.status_code == status
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert answer.headers["x-should-retry"] == "false"
    assert transcriber.params == []


async def test_the_exact_limit_is_accepted_and_one_byte_more_refused(
    client: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    assert (await post(client, bytes(LIMIT))).status_code == 200
    answer = await post(client, bytes(LIMIT + 1))
    assert answer.status_code == 413
    error = error_of(answer)
    assert re.fullmatch(
        rf"Maximum content size limit \({LIMIT}\) exceeded \(\d+ bytes read\)", error["message"]
    )
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, None)
    assert answer.headers["x-should-retry"] == "false"
    assert len(transcriber.uploads) == 1


@pytest.mark.parametrize(
    ("raised", "status", "kind", "headers"),
    [
        (InvalidAudioError("no audio"), 400, "invalid_request_error", {"x-should-retry": "false"}),
        (AudioTooShortError("short", param="file"), 400, "invalid_request_error", {}),
        (
            OverloadedError("busy", retry_after_s=2.2),
            503,
            "server_error",
            {"retry-after": "3", "x-should-retry": "true"},
        ),
        (CrowdedError("crowd"), 429, "requests", {"retry-after": "1", "x-should-retry": "true"}),
        (OverloadedError("full"), 503, "server_error", {"retry-after": "1"}),
        (RateLimitError("many"), 429, "requests", {"retry-after": "1", "x-should-retry": "true"}),
        (DeadlineExceededError("late"), 504, "server_error", {"x-should-retry": "false"}),
        (PeerLostError("gone"), 500, "server_error", {}),
    ],
)
async def test_errors_of_the_pipeline_have_their_status_and_headers(
    raised: SplitscribeError,
    status: int,
    kind: str,
    headers: dict[str, str],
    client: httpx.AsyncClient,
    transcriber: FakeTranscriber,
) -> None:
    transcriber.error = raised
    answer = await post(client)
    assert answer.status_code == status
    error = error_of(answer)
    assert (error["message"], error["type"]) == (raised.message, kind)
    assert (error["param"], error["code"]) == (raised.param, raised.code)
    assert headers.items() <= answer.headers.items()


async def test_a_bug_is_a_500_that_tells_only_the_request_id(
    client: httpx.AsyncClient, transcriber: FakeTranscriber, caplog: pytest.LogCaptureFixture
) -> None:
    transcriber.error = RuntimeError("secret detail")
    with caplog.at_level(logging.ERROR, logger="router"):
        answer = await client.post(
            URL, data=MODEL_FORM, files={"file": AUDIO}, headers={"x-request-id": "req_me"}
        )
    assert answer.status_code == 500
    error = error_of(answer)
    assert "secret" not in error["message"]
    assert "req_me" in error["message"]
    assert error["type"] == "server_error"
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


async def test_work_cancelled_from_inside_is_a_500(
    client: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    transcriber.error = asyncio.CancelledError()
    assert (await post(client)).status_code == 500


async def test_a_pipeline_that_outlives_its_deadline_is_cancelled(
    transcriber: FakeTranscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.service.GRACE_S", 0.0)
    transcriber.hold = True
    settings = make_settings(stall_timeout_s=0.05)
    async with client_of(create_app(make_registry(transcriber), settings)) as client:
        answer = await post(client)
    assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
    assert transcriber.cancelled.is_set()


async def test_a_client_may_say_how_long_its_request_may_take(
    client: httpx.AsyncClient, transcriber: FakeTranscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.service.GRACE_S", 0.0)
    form: dict[str, Any] = {"data": MODEL_FORM, "files": {"file": AUDIO}}
    transcriber.hold = True
    answer = await client.post(URL, **form, headers={"x-splitscribe-timeout": "0.05"})
    assert (answer.status_code, error_of(answer)["code"]) == (504, "timeout_exceeded")
    assert "within its 0.05 s" in error_of(answer)["message"]
    assert transcriber.cancelled.is_set()
    for wrong in ("soon", "0", "-1", "nan"):
        answer = await client.post(URL, **form, headers={"x-splitscribe-timeout": wrong})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "x-splitscribe-timeout")


async def test_too_much_pending_audio_is_refused_before_the_upload_is_read(
    transcriber: FakeTranscriber,
) -> None:
    app = create_app(make_registry(transcriber), make_settings(max_pending_audio_s=1.0))
    transcriber.hold = True
    async with client_of(app) as client:
        first = asyncio.create_task(post(client, bytes(20_000)))
        assert await asyncio.to_thread(transcriber.started.wait, 20.0)
        answer = await post(client, bytes(20_000))
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-should-retry"] == "true"
        assert error_of(answer)["type"] == "requests"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        transcriber.hold = False
        assert (await post(client, bytes(20_000))).status_code == 200


async def test_a_client_has_so_many_uploads_under_way_at_most(
    transcriber: FakeTranscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.service.MAX_UPLOADS", 1)
    app = create_app(make_registry(transcriber), make_settings())
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"--X"
        begun.set()
        await may_end.wait()

    def client_at(address: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, client=(address, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async with client_at("10.0.0.1") as one, client_at("10.0.0.2") as other:
        form = {"content-type": "multipart/form-data; boundary=X"}
        uploading = asyncio.create_task(one.post(URL, content=slow(), headers=form))
        await begun.wait()
        answer = await post(one)
        assert (answer.status_code, error_of(answer)["code"]) == (429, "rate_limit_exceeded")
        assert answer.headers["retry-after"]
        assert (await post(other)).status_code == 200
        may_end.set()
        await uploading
        assert (await post(one)).status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/nothing", 404, "unknown_url"),
        ("/v1/audio/nothing", 404, "unknown_url"),
        (f"{URL}/", 404, "unknown_url"),
        ("/v1/models/openai%2Fwhisper-tiny", 404, "model_not_found"),
        (URL, 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_there_is_told_in_the_envelope(
    path: str, status: int, code: str, client: httpx.AsyncClient
) -> None:
    answer = await client.get(path)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)


async def test_a_wrong_key_is_refused_and_not_shown(transcriber: FakeTranscriber) -> None:
    app = create_app(make_registry(transcriber), make_settings(api_key=("other", "schluessel")))
    async with client_of(app) as client:
        key = b"Bearer schluessel"
        for wrong in ({}, {"authorization": b"Bearer schl"}, {"authorization": b"Basic " + key}):
            answer = await client.get("/v1/models", headers=wrong)
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
            assert error["type"] == "invalid_request_error"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "schl" not in error["message"]
        headers = {"authorization": key}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.get("/docs", headers=headers)).status_code == 404, (
            "a page could send no key"
        )


async def test_no_log_line_holds_what_a_client_sent(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, transcriber: FakeTranscriber
) -> None:
    caplog.set_level(logging.DEBUG)
    transcriber.texts = (" A secret.",)
    fields: tuple[dict[str, Any], ...] = (
        {"prompt": "secret"},
        {"hotwords": "secret", "stream": "true"},
        {"language": "secret"},
        {"prompt": "secret", "temperature": "secret"},
        {"secret": "secret"},
        {"keywords[]": '[{"secret": 1}]'},
    )
    for form in fields:
        file = {"file": ("secret.wav", AUDIO)}
        answer = await client.post(URL, data={**MODEL_FORM, **form}, files=file)
        assert answer.status_code in (200, 400)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("router")]
    assert len(ours) >= len(fields)
    assert not [line for line in ours if "secret" in line.lower()]


async def test_no_path_forges_a_log_line(
    transcriber: FakeTranscriber, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="router")
    paths = ("/v1/models/%1b%5b31m", "/a%0d%0aINFO%e2%80%a8%c2%85", "/" + "%ff" * 2000)
    for keys in ((), ("one",)):
        app = create_app(make_registry(transcriber), make_settings(api_key=keys))
        async with client_of(app) as client:
            for path in paths:
                assert (await client.get(path)).status_code in (401, 404)
    messages = [record.getMessage() for record in caplog.records if "GET" in record.getMessage()]
    assert len(messages) >= 4
    assert all(message.isprintable() and len(message) < 400 for message in messages)
