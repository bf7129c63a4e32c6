"""The routes over an in-process transport: answers, errors, headers, documentation."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.errors import (
    AudioTooShortError,
    DeadlineExceededError,
    InvalidAudioError,
    OverloadedError,
    PeerLostError,
    SplitscribeError,
)
from router.routes import create_app
from router.schemas import ErrorResponse
from tests.unit.router.fakes import LIMIT, MODEL, FakePipeline, make_settings

URL = "/v1/audio/transcriptions"
AUDIO = b"RIFF....WAVE"
MODEL_FORM = {"model": "whisper-1"}


@pytest.fixture
def pipeline() -> FakePipeline:
    return FakePipeline()


@pytest.fixture
def app(pipeline: FakePipeline, tmp_path: Path) -> FastAPI:
    return create_app(pipeline, make_settings(), MODEL, spool_dir=tmp_path)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def post(client: httpx.AsyncClient, content: bytes = AUDIO, **form: Any) -> httpx.Response:
    return await client.post(URL, data={**MODEL_FORM, **form}, files={"file": ("a.wav", content)})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The envelope's content, after checking that it is one and that the id is there."""
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    body: dict[str, Any] = answer.json()
    ErrorResponse.model_validate(body)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def test_json_by_default(client: httpx.AsyncClient, pipeline: FakePipeline) -> None:
    answer = await post(client)
    assert answer.status_code == 200
    assert answer.json() == {
        "text": "Hello there. General.",
        "usage": {"type": "duration", "seconds": 9},
    }
    assert pipeline.uploads == [AUDIO]


async def test_text(client: httpx.AsyncClient) -> None:
    answer = await post(client, response_format="text")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == "Hello there. General.\n"


async def test_verbose_json(client: httpx.AsyncClient) -> None:
    form = {"response_format": "verbose_json", "timestamp_granularities[]": "segment"}
    answer = await post(client, **form)
    assert answer.json()["language"] == "english"
    assert len(answer.json()["segments"]) == 2


async def test_fields_reach_the_pipeline(client: httpx.AsyncClient, pipeline: FakePipeline) -> None:
    await post(client, language="German", prompt="Grüße", temperature="0.5", seed="3")
    (params,) = pipeline.params
    assert (params.language, params.prompt) == ("de", "Grüße")
    assert (params.temperature, params.seed, params.task) == (0.5, 3, "transcribe")


async def test_the_stages_are_in_server_timing(client: httpx.AsyncClient) -> None:
    answer = await post(client)
    stages = dict(
        re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"]),
    )
    assert list(stages) == ["upload", "audio", "queue", "encode", "transfer", "decode", "total"]
    assert (stages["audio"], stages["encode"], stages["decode"]) == ("1.0", "3.0", "5.0")
    assert 'transfer;dur=4.0;desc="1024 bytes"' in answer.headers["server-timing"]
    assert answer.headers["openai-processing-ms"].isdigit()


async def test_the_spool_file_lives_exactly_as_long_as_the_work(
    client: httpx.AsyncClient, pipeline: FakePipeline, tmp_path: Path
) -> None:
    await post(client)
    pipeline.error = RuntimeError("a bug")
    await post(client)
    assert len(pipeline.uploads) == 2, "it was there while the pipeline read it"
    assert not any(path.exists() for path in pipeline.paths)
    assert {path.parent for path in pipeline.paths} == {tmp_path}


@pytest.mark.parametrize(
    ("form", "status", "param", "code"),
    [
        ({"model": "whisper-9"}, 404, None, "model_not_found"),
        ({"model": ""}, 400, "model", None),
        ({"language": "klingon"}, 400, "language", "invalid_language_format"),
        ({"language": "fr"}, 400, "language", "unsupported_value"),
        ({"temperature": "2"}, 400, "temperature", None),
        ({"response_format": "srt"}, 400, "response_format", "unsupported_value"),
        ({"stream": "true"}, 400, "stream", "unsupported_value"),
        (
            {"timestamp_granularities[]": "word"},
            400,
            "timestamp_granularities",
            "unsupported_value",
        ),
        ({"include[]": "logprobs"}, 400, "include", "unsupported_value"),
        ({"beam_size": "5"}, 400, "beam_size", "unknown_parameter"),
        ({"prompt": ["a", "b"]}, 400, "prompt", None),
    ],
)
async def test_a_form_that_cannot_be_served_never_reaches_the_pipeline(
    form: dict[str, Any],
    status: int,
    param: str | None,
    code: str | None,
    client: httpx.AsyncClient,
    pipeline: FakePipeline,
) -> None:
    answer = await post(client, **form)
    error = error_of(answer)
    assert answer.status_code == status
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert answer.headers["x-should-retry"] == "false"
    assert pipeline.params == []


async def test_a_missing_or_non_upload_file(client: httpx.AsyncClient) -> None:
    for files in ({"other": (None, b"x")}, {"file": (None, b"x")}):
        answer = await client.post(URL, data=MODEL_FORM, files=files)
        assert answer.status_code == 400
        error = error_of(answer)
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            None,
            None,
        )


async def test_an_empty_file(client: httpx.AsyncClient) -> None:
    answer = await post(client, b"")
    assert (answer.status_code, error_of(answer)["code"]) == (400, "audio_too_short")


async def test_a_body_that_is_no_form(client: httpx.AsyncClient) -> None:
    answer = await client.post(URL, json={"model": "whisper-1"})
    assert answer.status_code == 400
    assert "multipart/form-data" in error_of(answer)["message"]


async def test_the_exact_limit_is_accepted_and_one_byte_more_refused(
    client: httpx.AsyncClient, pipeline: FakePipeline
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
    assert len(pipeline.uploads) == 1


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
        (DeadlineExceededError("late"), 504, "server_error", {}),
        (PeerLostError("gone"), 500, "server_error", {}),
    ],
)
async def test_errors_of_the_pipeline_have_their_status_and_headers(
    raised: SplitscribeError,
    status: int,
    kind: str,
    headers: dict[str, str],
    client: httpx.AsyncClient,
    pipeline: FakePipeline,
) -> None:
    pipeline.error = raised
    answer = await post(client)
    assert answer.status_code == status
    error = error_of(answer)
    assert (error["message"], error["type"]) == (raised.message, kind)
    assert (error["param"], error["code"]) == (raised.param, raised.code)
    assert headers.items() <= answer.headers.items()


async def test_a_bug_is_a_500_that_tells_only_the_request_id(
    client: httpx.AsyncClient, pipeline: FakePipeline, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline.error = RuntimeError("secret detail")
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
    client: httpx.AsyncClient, pipeline: FakePipeline
) -> None:
    pipeline.error = asyncio.CancelledError()
    assert (await post(client)).status_code == 500


async def test_a_pipeline_that_outlives_its_deadline_is_cancelled(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.supervise.GRACE_S", 0.0)
    pipeline.hold = True
    settings = make_settings(min_deadline_s=0.05, max_deadline_s=0.05)
    async with client_of(create_app(pipeline, settings, MODEL)) as client:
        answer = await post(client)
    assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
    assert pipeline.cancelled.is_set()


async def test_too_much_pending_audio_is_refused_before_the_upload_is_read(
    pipeline: FakePipeline,
) -> None:
    app = create_app(pipeline, make_settings(max_pending_audio_s=1.0), MODEL)
    pipeline.hold = True
    async with client_of(app) as client:
        first = asyncio.create_task(post(client, bytes(20_000)))
        assert await asyncio.to_thread(pipeline.started.wait, 20.0)
        answer = await post(client, bytes(20_000))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-should-retry"] == "true"
        assert error_of(answer)["type"] == "server_error"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        pipeline.hold = False
        assert (await post(client, bytes(20_000))).status_code == 200


async def test_models(client: httpx.AsyncClient) -> None:
    listing = (await client.get("/v1/models")).json()
    assert listing["object"] == "list"
    assert [model["id"] for model in listing["data"]] == list(MODEL.names)
    assert listing["data"][0] == {
        "id": "openai/whisper-large-v3",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "splitscribe",
    }


@pytest.mark.parametrize(
    "spelling", ["openai/whisper-large-v3", "openai%2Fwhisper-large-v3", "demo", "whisper-1"]
)
async def test_one_model_in_every_spelling(spelling: str, client: httpx.AsyncClient) -> None:
    answer = await client.get(f"/v1/models/{spelling}")
    assert answer.status_code == 200
    assert answer.json()["id"] == spelling.replace("%2F", "/")


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models/openai%2Fwhisper-tiny")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/", "/v1/audio/nothing", f"{URL}/"])
async def test_unknown_paths_are_in_the_envelope(path: str, client: httpx.AsyncClient) -> None:
    answer = await client.get(path)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_url")


async def test_wrong_methods_are_in_the_envelope(client: httpx.AsyncClient) -> None:
    answer = await client.get(URL)
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


async def test_health_is_503_until_both_pools_are_ready(
    client: httpx.AsyncClient, pipeline: FakePipeline
) -> None:
    pipeline.ready = False
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "not ready")
    assert answer.json()["pools"]["decoder"]["ready"] is False
    pipeline.ready = True
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    encoder = answer.json()["pools"]["encoder"]
    assert (encoder["ready"], encoder["replicas"]) == (True, 1)
    assert encoder["workers"][0]["pages_free"] == 3
    assert answer.json()["router"] == {"requests": 0, "pending_audio_s": 0.0}


async def test_health_that_cannot_be_had_is_503(
    client: httpx.AsyncClient, pipeline: FakePipeline
) -> None:
    pipeline.health_error = RuntimeError("no pools")
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["pools"]) == (503, {})


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/demo", URL])
async def test_the_api_key_is_needed_where_one_is_set(path: str, pipeline: FakePipeline) -> None:
    app = create_app(pipeline, make_settings(api_key="schlüssel"), MODEL)
    async with client_of(app) as client:
        method = "POST" if path == URL else "GET"
        key = "Bearer schlüssel".encode()
        for wrong in ({}, {"authorization": b"Bearer schl"}, {"authorization": b"Basic " + key}):
            answer = await client.request(method, path, headers=wrong)
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
            assert error["type"] == "invalid_request_error"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "schl" not in error["message"]
        answer = await client.request(method, path, headers={"authorization": key})
        assert answer.status_code == (400 if path == URL else 200)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 200


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-1.2_3:x/y", "abc-1.2_3:x/y"), ("a b;c\tд", "abc"), ("x" * 500, "x" * 128)],
)
async def test_a_request_id_is_honoured_without_what_could_forge_a_log_line(
    sent: str, echoed: str, client: httpx.AsyncClient, pipeline: FakePipeline
) -> None:
    answer = await client.post(
        URL,
        data=MODEL_FORM,
        files={"file": AUDIO},
        headers={"x-request-id": sent.encode()},
    )
    assert answer.headers["x-request-id"] == echoed
    assert pipeline.contexts[0].request_id == echoed


async def test_every_answer_has_an_id_of_its_own(client: httpx.AsyncClient) -> None:
    ids = [
        (await client.get(path)).headers["x-request-id"]
        for path in ("/health", "/docs", "/no", "/")
    ]
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", request_id) for request_id in ids)
    assert len(set(ids)) == len(ids)


async def test_the_id_can_be_left_to_a_proxy(pipeline: FakePipeline) -> None:
    app = create_app(pipeline, make_settings(), MODEL, echo_request_id=False)
    async with client_of(app) as client:
        answer = await client.get("/health", headers={"x-request-id": "a"})
    assert "x-request-id" not in answer.headers


async def test_the_documentation_describes_the_form_and_the_answers(
    client: httpx.AsyncClient,
) -> None:
    document = (await client.get("/openapi.json")).json()
    operation = document["paths"][URL]["post"]
    form = operation["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["file", "model"]
    assert form["additionalProperties"] is False
    assert set(operation["responses"]) == {"200", "4XX", "5XX"}
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/plain"}
    assert "422" not in json.dumps(document["paths"])
    assert (await client.get("/docs")).status_code == 200
