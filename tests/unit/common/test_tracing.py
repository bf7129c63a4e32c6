"""One trace per request, whole and without anything that a client sent; nothing where it is off."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message

from cluster.common.errors import WorkerGoneError
from cluster.common.messages import DecodeOptions, DecodeRequest, EncodeRequest
from cluster.common.settings_sources import load_settings
from cluster.common.tracing import NO_SPAN, NO_TRACER, make_tracer
from cluster.serve.replicas.pool_replicas import ColocatedWorker
from router.http.routes import create_app
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import make_pcm
from tests.support.router_fakes import (
    FakeTranscriber,
    client_of,
    make_registry,
    make_settings,
    post,
)
from tests.support.traced import Traced, id_of, parent_of

CLIENTS_TRACE = "0123456789abcdef0123456789abcdef"
CLIENTS_SPAN = "00f067aa0ba902b7"


@pytest.fixture
def traced() -> Iterator[Traced]:
    one = Traced()
    yield one
    one.tracer.close()


def test_off_by_default_it_makes_nothing() -> None:
    assert make_tracer(load_settings(environ={}), "router", "r") is NO_TRACER
    assert NO_TRACER.root("a", "") is NO_TRACER.span("b", "x", window=1) is NO_SPAN
    with NO_SPAN as span:
        span.stage("c", 0.0, 1.0)
    assert NO_SPAN.traceparent == ""


def test_a_collector_that_is_gone_holds_nobody_up() -> None:
    """Neither a request nor the shutdown, with many spans left to send."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    tracer = make_tracer(load_settings(None, {"otel_endpoint": url}, environ={}), "router", "r")
    for _ in range(3000):
        with tracer.root("request", "") as span:
            span.stage("upload", 0.0, 0.1)
    closing = threading.Thread(target=tracer.close)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()


def test_children_name_their_parent_by_a_text(traced: Traced) -> None:
    tracer = traced.tracer
    with tracer.root("request", "") as root, tracer.span("window", root.traceparent, window=3) as w:
        w.event("retry", reason="full")
        w.stage("encode", 0.0, 0.5, windows=2)
    spans = traced.spans()
    assert parent_of(spans["request"]) is None
    assert parent_of(spans["window"]) == id_of(spans["request"])
    assert parent_of(spans["encode"]) == id_of(spans["window"])
    encode = spans["encode"]
    assert encode.end_time is not None
    assert encode.start_time is not None
    assert encode.end_time - encode.start_time == 500_000_000
    assert dict(spans["window"].attributes or {}) == {"splitscribe.window": 3}
    assert spans["window"].events[0].name == "retry"


def test_the_clients_trace_is_continued_and_its_no_is_heard(traced: Traced) -> None:
    parent = f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}"
    with traced.tracer.root("taken", f"{parent}-01") as span:
        assert span.traceparent.startswith(f"00-{CLIENTS_TRACE}-")
    with traced.tracer.root("not taken", f"{parent}-00") as span:
        span.stage("inside", 0.0, 1.0)
        with traced.tracer.span("child", span.traceparent):
            assert span.traceparent.endswith("-00")
    with traced.tracer.root("nonsense", "a forged; header"):
        pass
    spans = traced.spans()
    assert set(spans) == {"taken", "nonsense"}
    assert f"{parent_of(spans['taken']):016x}" == CLIENTS_SPAN
    assert parent_of(spans["nonsense"]) is None


def test_an_error_is_noted_by_its_class_alone(traced: Traced) -> None:
    with pytest.raises(WorkerGoneError), traced.tracer.root("request", ""):
        raise WorkerGoneError("with a secret in it")
    span = traced.spans()["request"]
    assert span.status.description == "WorkerGoneError"
    assert "secret" not in span.to_json()


async def test_a_request_has_its_span_and_health_has_none(traced: Traced) -> None:
    app = create_app(make_registry(FakeTranscriber()), make_settings(), tracer=traced.tracer)
    async with client_of(app) as client:
        await client.get("/health")
        answer = await post(client, prompt="a secret")
    spans = traced.spans()
    assert set(spans) == {"POST /v1/audio/transcriptions", "upload"}
    request = spans["POST /v1/audio/transcriptions"]
    attributes = dict(request.attributes or {})
    assert attributes["http.response.status_code"] == 200
    assert attributes["splitscribe.request_id"] == answer.headers["x-request-id"]
    assert parent_of(spans["upload"]) == id_of(request)
    assert not [span for span in spans.values() if "secret" in span.to_json()]


async def test_a_refused_request_tells_its_code(traced: Traced) -> None:
    app = create_app(make_registry(FakeTranscriber()), make_settings(), tracer=traced.tracer)
    async with client_of(app) as client:
        await post(client, model="nobody")
    attributes = dict(traced.spans()["POST /v1/audio/transcriptions"].attributes or {})
    assert attributes["splitscribe.error"] == "model_not_found"


async def test_an_upgrade_where_requests_are_traced_is_refused_as_elsewhere(
    traced: Traced,
) -> None:
    app = create_app(make_registry(FakeTranscriber()), make_settings(), tracer=traced.tracer)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/audio/transcriptions", "query_string": b""}
    await app({**scope, "headers": [(b"host", b"localhost")]}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert not traced.spans()


@pytest.mark.usefixtures("as_replica")
async def test_workers_tell_their_stages_below_the_callers_span(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both roles in one process, with real engines: the spans of a window and their order."""
    monkeypatch.setattr("cluster.serve.replicas.workers.make_tracer", lambda *names: traced.tracer)
    flags: dict[str, Any] = {
        "model": str(cached_checkpoint()),
        "cluster_key": "k" * 32,
        "encoder": {"threads": 1, "device": "cpu", "export_windows": 2},
        "decoder": {"threads": 1, "device": "cpu", "kv_windows": 2},
    }
    worker = ColocatedWorker(load_settings(None, flags, environ={}), "build")
    options = DecodeOptions(language="en", max_new_tokens=8)
    with traced.tracer.root("request", "") as root:
        pcm = make_pcm(1.0)
        reply = await worker.encode(
            EncodeRequest("r", 0, 1, pcm, 30.0, traceparent=root.traceparent)
        )
        await worker.decode(
            DecodeRequest("r", 0, 1, reply.handle, options, 30.0, traceparent=root.traceparent)
        )
    untraced = await worker.encode(EncodeRequest("r", 1, 1, pcm, 30.0))
    await worker.decode(DecodeRequest("r", 1, 1, untraced.handle, options, 30.0))
    await worker.shut_down()
    spans = traced.spans()
    below = {
        "encoder": ["encoder queue", "encode batch"],
        "decoder": ["decoder queue", "KV transfer", "prefill", "decode"],
    }
    assert set(spans) == {"request", *below, *below["encoder"], *below["decoder"]}
    for role, stages in below.items():
        whole = spans[role]
        assert parent_of(whole) == id_of(spans["request"])
        assert {parent_of(spans[stage]) for stage in stages} == {id_of(whole)}
        begun = [spans[stage].start_time or 0 for stage in stages]
        assert begun == sorted(begun)
    moved = dict(spans["KV transfer"].attributes or {})
    assert moved["splitscribe.peer"] == reply.handle.agent
    assert moved["splitscribe.transport"] == "memory"
    assert int(moved["splitscribe.bytes"]) > 0  # type: ignore[arg-type]
