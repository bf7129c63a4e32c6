"""Traces of a running cluster, as a collector gets them; and its log lines as JSON."""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.e2e.conftest import Server, start_server, stop_server, wait_until
from tests.support.audio.recordings import delayed

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

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


@dataclass(frozen=True)
class Received:
    name: str
    trace: str
    id: str
    parent: str
    role: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]


@dataclass
class Collector:
    url: str = ""
    spans: list[Received] = field(default_factory=list)
    raw: bytes = b""

    def take(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            role = _attributes(resource.resource.attributes)["splitscribe.role"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            role,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _attributes(span.attributes),
                        )
                    )

    def trace_of(self, request_id: str) -> list[Received]:
        traces = {
            span.trace
            for span in self.spans
            if span.attributes.get("splitscribe.request_id") == request_id
        }
        assert len(traces) <= 1
        return [span for span in self.spans if span.trace in traces]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            made.take(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    yield made
    server.shutdown()


@pytest.fixture(scope="module")
def watched(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(
        tmp_path_factory.mktemp("watched"),
        env={
            "SPLITSCRIBE_OTEL_ENDPOINT": collector.url,
            "SPLITSCRIBE_LOG_FORMAT": "json",
        },
    )
    yield running
    assert stop_server(running) == 0, running.output()[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_is_one_trace_over_all_roles(
    watched: Server, collector: Collector, streamed: bool
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
        counts = Counter(span.name for span in collector.trace_of(request_id))
        n_windows = counts["window"]
        return (
            n_windows > 1
            and all(counts[name] == 1 for name in (REQUEST, *OF_REQUEST))
            and all(counts[name] >= n_windows for name in OF_WINDOW)
        )

    try:
        wait_until(whole, EXPORT_S, "the whole trace")
    except AssertionError:
        came = Counter(span.name for span in collector.trace_of(request_id))
        raise AssertionError(f"incomplete: {came}") from None
    spans = collector.trace_of(request_id)
    by_id = {span.id: span for span in spans}
    for span in spans:
        if span.name == REQUEST:
            assert span.parent == ""
            continue
        parent = by_id[span.parent]
        assert parent.name == PARENTS[span.name]
        assert span.ended_ns >= span.began_ns
        assert span.began_ns >= parent.began_ns - 50_000_000, (span, parent)  # clocks' rounding
        assert ROLES.get(span.name, span.role) == span.role
    moved = [span.attributes for span in spans if span.name == "KV transfer"]
    assert all(one["splitscribe.transport"].startswith("nixl") for one in moved)
    assert all(one["splitscribe.bytes"] > 0 for one in moved)
    assert b"unheard-of" not in collector.raw
