"""Traces of a running cluster, as a collector gets them; and its log lines as JSON."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.conftest import Server, serving, wait_until
from tests.support.audio.recordings import delayed
from tests.support.http_host import Answer, Host, http_host

EXPORT_S = 30.0  # a replica sends what it has every 5 s
REQUEST = "POST /v1/audio/transcriptions"
OF_REQUEST = {"upload", "audio"}
PARENTS = {
    "upload": REQUEST,
    "audio": REQUEST,
    "window": REQUEST,
    "call encoder": "window",
    "call decoder": "window",
    "encoder": "call encoder",
    "decoder": "call decoder",
    "encoder queue": "encoder",
    "encode batch": "encoder",
    "decoder queue": "decoder",
    "KV transfer": "decoder",
    "prefill": "decoder",
    "decode": "decoder",
}
OF_WINDOW = PARENTS.keys() - OF_REQUEST
ROLES = {"encoder": "encoder", "decoder": "decoder", "window": "router", "KV transfer": "decoder"}


def attributes(owner: Any) -> dict[str, Any]:
    pairs = owner.attributes
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def received(collector: Host) -> list[tuple[str, Any]]:
    found = []
    for came in collector.came:
        assert came.path == "/v1/traces"
        is_packed = came.headers.get("content-encoding") == "gzip"
        body = gzip.decompress(came.body) if is_packed else came.body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            role = attributes(resource.resource)["splitscribe.role"]
            found += [(role, span) for scope in resource.scope_spans for span in scope.spans]
    return found


def trace_of(collector: Host, request_id: str) -> list[tuple[str, Any]]:
    spans = received(collector)
    traces = {
        span.trace_id
        for _, span in spans
        if attributes(span).get("splitscribe.request_id") == request_id
    }
    assert len(traces) <= 1
    return [(role, span) for role, span in spans if span.trace_id in traces]


@pytest.fixture(scope="module")
def collector() -> Iterator[Host]:
    headers = {"content-type": "application/x-protobuf"}
    with http_host(lambda came, host: Answer(headers=headers)) as host:
        yield host


@pytest.fixture(scope="module")
def watched(collector: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    env = {"SPLITSCRIBE_OTEL_ENDPOINT": collector.url, "SPLITSCRIBE_LOG_FORMAT": "json"}
    with serving(tmp_path_factory.mktemp("watched"), env=env) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_is_one_trace_over_all_roles(
    watched: Server, collector: Host, streamed: bool
) -> None:
    request_id = f"traced-{streamed}"
    answer = watched.client().audio.transcriptions.with_raw_response.create(
        model="whisper-1",
        file=("unheard-of.wav", delayed("long", 10 + streamed)),  # or less is encoded
        prompt="unheard-of",
        extra_headers={"x-request-id": request_id},
        extra_body={"fallback": False, "stream": streamed},
    )
    assert answer.http_response.read()

    def whole() -> bool:
        counts = Counter(span.name for _, span in trace_of(collector, request_id))
        n_windows = counts["window"]
        return (
            n_windows > 1
            and all(counts[name] == 1 for name in (REQUEST, *OF_REQUEST))
            and all(counts[name] >= n_windows for name in OF_WINDOW)
        )

    try:
        wait_until(whole, EXPORT_S, "the whole trace")
    except AssertionError:
        came = Counter(span.name for _, span in trace_of(collector, request_id))
        raise AssertionError(f"incomplete: {came}") from None
    spans = trace_of(collector, request_id)
    by_id = {span.span_id: span for _, span in spans}
    for role, span in spans:
        if span.name == REQUEST:
            assert not span.parent_span_id
            continue
        parent = by_id[span.parent_span_id]
        assert parent.name == PARENTS[span.name]
        began_ns = span.start_time_unix_nano
        assert span.end_time_unix_nano >= began_ns
        assert began_ns >= parent.start_time_unix_nano - 50_000_000, (span, parent)  # rounding
        assert ROLES.get(span.name, role) == role
    moved = [attributes(span) for _, span in spans if span.name == "KV transfer"]
    assert all(one["splitscribe.transport"].startswith("nixl") for one in moved)
    assert all(one["splitscribe.bytes"] > 0 for one in moved)
    assert not any(b"unheard-of" in span.SerializeToString() for _, span in received(collector))
