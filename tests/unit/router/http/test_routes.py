"""The routes over an in-process transport: answers, headers, models, health, documentation."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.common.messages import Role
from cluster.common.metrics import ROUTER_METRICS
from router.http.routes import create_app
from router.interface import PoolHealth
from tests.support.router_fakes import (
    AUDIO,
    LIMIT,
    MODEL_FORM,
    NAMES,
    TIMINGS,
    TRANSLATIONS_URL,
    URL,
    FakeTranscriber,
    client_of,
    make_registry,
    make_settings,
    post,
)


async def test_the_stages_are_in_server_timing(
    client: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    transcriber.timings = replace(TIMINGS, windows=1)
    assert 'desc="1 window"' in (await post(client)).headers["server-timing"]
    transcriber.timings = TIMINGS
    answer = await post(client)
    stages = dict(
        re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"]),
    )
    assert list(stages) == ["upload", "audio", "queue", "encode", "transfer", "decode", "total"]
    assert (stages["audio"], stages["encode"], stages["decode"]) == ("1.0", "3.0", "5.0")
    assert 'transfer;dur=4.0;desc="1024 bytes"' in answer.headers["server-timing"]
    assert answer.headers["openai-processing-ms"].isdigit()


@pytest.mark.parametrize(
    ("hits", "misses", "header"),
    [
        (0, 0, None),
        (2, 0, "hit;hits=2;windows=2"),
        (0, 3, "miss;hits=0;windows=3"),
        (1, 2, "partial;hits=1;windows=3"),
    ],
)
async def test_a_header_tells_what_was_encoded_before(
    client: httpx.AsyncClient,
    transcriber: FakeTranscriber,
    hits: int,
    misses: int,
    header: str | None,
) -> None:
    transcriber.timings = replace(TIMINGS, cache_hits=hits, cache_misses=misses)
    answer = await post(client)
    assert answer.headers.get("x-splitscribe-cache") == header


async def test_models(client: httpx.AsyncClient) -> None:
    listing = (await client.get("/v1/models")).json()
    assert listing["object"] == "list"
    assert [model["id"] for model in listing["data"]] == list(NAMES)
    assert listing["data"][0] == {
        "id": "openai/whisper-large-v3",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "splitscribe",
    }


async def test_health_is_503_until_both_pools_are_ready(
    client: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    transcriber.ready = False
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "not ready")
    assert answer.json()["pools"]["decoder"]["ready"] is False
    transcriber.ready = True
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    encoder = answer.json()["pools"]["encoder"]
    assert (encoder["ready"], encoder["replicas"]) == (True, 1)
    assert encoder["workers"][0]["pages_free"] == 3
    assert answer.json()["router"] == {
        "requests": 0,
        "pending_audio_s": 0.0,
        "realtime_sessions": 0,
        "max_upload_bytes": LIMIT,
    }


async def test_probes_tell_alive_from_ready_and_need_no_key(
    transcriber: FakeTranscriber,
) -> None:
    app = create_app(make_registry(transcriber), make_settings(api_key="key"))
    transcriber.ready = False

    async def statuses() -> list[int]:
        return [(await client.get(path)).status_code for path in ("/livez", "/readyz")]

    async with client_of(app) as client:
        assert await statuses() == [200, 503], "a model that loads is no reason to be killed"
        transcriber.ready = True
        assert await statuses() == [200, 200]
        await app.state.realtime.drain()
        assert await statuses() == [200, 503], "it stops"
        assert (await client.get("/version")).json() == {"version": version("splitscribe")}


async def test_health_answers_at_once_while_the_pools_do_not(
    client: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    """With what they said the last time; nothing is ready before they have said something."""
    may_answer, at_once = asyncio.Event(), transcriber.health

    async def slow() -> dict[Role, PoolHealth]:
        await may_answer.wait()
        return await at_once()

    transcriber.health = slow  # type: ignore[method-assign]
    async with asyncio.timeout(3.0):  # they have 5 s
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["age_s"]) == (503, None)
        may_answer.set()
        assert (await client.get("/health")).status_code == 200
        may_answer.clear()
        transcriber.ready = False
        answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    assert answer.json()["age_s"] > 0.0
    assert answer.json()["pools"]["encoder"]["workers"]


async def test_health_that_cannot_be_had_is_503(
    client: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    transcriber.health_error = RuntimeError("no pools")
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["pools"]) == (503, {})


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-1.2_3:x/y", "abc-1.2_3:x/y"), ("a b;c\tд", "abc"), ("x" * 500, "x" * 128)],
)
async def test_a_request_id_is_honoured_without_what_could_forge_a_log_line(
    sent: str, echoed: str, client: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    answer = await client.post(
        URL,
        data=MODEL_FORM,
        files={"file": AUDIO},
        headers={"x-request-id": sent.encode()},
    )
    assert answer.headers["x-request-id"] == echoed
    assert transcriber.contexts[0].request_id == echoed


async def test_every_answer_has_an_id_of_its_own(client: httpx.AsyncClient) -> None:
    ids = [
        (await client.get(path)).headers["x-request-id"]
        for path in ("/health", "/docs", "/no", "/")
    ]
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", request_id) for request_id in ids)
    assert len(set(ids)) == len(ids)


async def test_the_id_can_be_left_to_a_proxy(transcriber: FakeTranscriber) -> None:
    app = create_app(make_registry(transcriber), make_settings(), echo_request_id=False)
    async with client_of(app) as client:
        answer = await client.get("/health", headers={"x-request-id": "a"})
    assert "x-request-id" not in answer.headers


async def test_pages_of_other_origins_are_kept_out_unless_they_are_let_in(
    client: httpx.AsyncClient, transcriber: FakeTranscriber
) -> None:
    origin = {"origin": "https://app.example"}
    preflight = {**origin, "access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "authorization"
    assert (
        "access-control-allow-origin" not in (await client.get("/health", headers=origin)).headers
    )
    assert (await client.options(URL, headers=preflight)).status_code == 405
    settings = make_settings(cors_origins="https://app.example", api_key="key")
    transcriber.error = RuntimeError("a bug")
    async with client_of(create_app(make_registry(transcriber), settings)) as open_client:
        answer = await open_client.options(URL, headers=preflight)
        assert answer.status_code == 200
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        refused = await open_client.get("/v1/models", headers=origin)
        keyed = {**origin, "authorization": "Bearer key"}
        crashed = await open_client.post(URL, data=MODEL_FORM, files={"file": AUDIO}, headers=keyed)
        stranger = await open_client.get("/health", headers={"origin": "https://x.example"})
    assert (refused.status_code, crashed.status_code) == (401, 500)
    for answer in (refused, crashed):
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in stranger.headers


async def test_the_documentation_describes_the_forms_and_the_answers(
    client: httpx.AsyncClient,
) -> None:
    document = (await client.get("/openapi.json")).json()
    types = {"application/json", "text/plain", "text/vtt", "text/event-stream"}
    for url in (URL, TRANSLATIONS_URL):
        operation = document["paths"][url]["post"]
        form = operation["requestBody"]["content"]["multipart/form-data"]["schema"]
        assert form["required"] == ["file", "model"]
        assert form["additionalProperties"] is False
        assert set(operation["responses"]) == {"200", "4XX", "5XX"}
        assert set(operation["responses"]["200"]["content"]) == types
    assert "422" not in json.dumps(document["paths"])
    assert (await client.get("/docs")).status_code == 200


async def test_everything_that_the_documentation_refers_to_is_in_it(
    client: httpx.AsyncClient,
) -> None:
    text = (await client.get("/openapi.json")).text
    schemas = json.loads(text)["components"]["schemas"]
    refs = set(re.findall(r'"\$ref":\s*"([^"]+)"', text))
    assert refs
    assert refs <= {f"#/components/schemas/{name}" for name in schemas}


# ---- `/metrics`: what Prometheus reads is what was counted, under names that stay.


def read(answer: httpx.Response) -> dict[tuple[str, ...], float]:
    """Values by name and labels, as Prometheus' own parser reads them."""
    assert answer.status_code == 200
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_what_was_counted_is_read() -> None:
    transcriber = FakeTranscriber()
    async with client_of(create_app(make_registry(transcriber), make_settings())) as client:
        await post(client)
        await post(client, model="nobody")
        transcriber.error = RuntimeError("a bug")
        await post(client)
        await client.get("/health")
        found = read(await client.get("/metrics"))
        names = {name for name, *_ in found}
        declared = {spec.name for spec in ROUTER_METRICS if not spec.tags}
        assert not [name for name in declared if not names & {name, f"{name}_bucket"}]
        assert not [name for name in names if not name.startswith(("splitscribe_", "process_"))]
        assert found["splitscribe_requests_total", "200"] == 1
        for name in ("splitscribe_upload_seconds", "splitscribe_request_seconds"):
            assert found[f"{name}_count",] == 3
            assert 0 < found[f"{name}_sum",] < 180
        assert found["splitscribe_errors_total", "404", "model_not_found"] == 1
        assert found["splitscribe_errors_total", "500", "UnexpectedError"] == 1
        assert found["splitscribe_worker_pages_free", "demo", "encoder", "encoder-1"] == 3
        assert found["splitscribe_workers", "decoder", NAMES[0]] == 1
        transcriber.ready, transcriber.n_workers = False, 0
        later = read(await client.get("/metrics"))
        assert [later[name] for name in later if name[0] == "splitscribe_ready"] == [0]
        assert not [name for name in later if "worker_" in name[0]], "they are gone"


@pytest.mark.parametrize(
    ("settings", "without_key", "with_key"),
    [
        ({}, 200, 200),
        ({"api_key": "key"}, 401, 200),
        ({"api_key": "key", "metrics": "on"}, 200, 200),
        ({"metrics": "off"}, 404, 404),
    ],
)
async def test_a_key_is_needed_where_there_are_keys_unless_a_setting_says_else(
    settings: dict[str, Any], without_key: int, with_key: int
) -> None:
    app = create_app(make_registry(FakeTranscriber()), make_settings(**settings))
    async with client_of(app) as client:
        assert (await client.get("/metrics")).status_code == without_key
        headers = {"authorization": "Bearer key"}
        assert (await client.get("/metrics", headers=headers)).status_code == with_key
