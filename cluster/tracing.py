"""Traces by OpenTelemetry: one per request, with a span for each stage and each hand-off.

Off unless `otel_endpoint` is set; then `span` gives the same do-nothing object every time, and
messages carry an empty `traceparent`. What crosses a process is that string (W3C Trace Context).
Stages whose times an engine tells afterwards are added to the span that is open. A span holds ids,
figures and peers, and nothing that a client sent but its request id.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from cluster.errors import ConfigurationError
from cluster.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

Kind = Literal["server", "client", "internal"]
Attribute = str | int | float | bool

SERVICE = "splitscribe"
EXPORT_TIMEOUT_S = 5.0
CLOSE_S = 2.0  # for what is left to be sent


class Span(Protocol):
    """A piece of work while it lasts; a context manager. An exception that leaves it is noted."""

    traceparent: str  # what children name as their parent; "" where nothing is traced

    def __enter__(self) -> Span: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def note(self, **attributes: Attribute) -> None:
        """Add attributes."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Something that happened now."""

    def stage(self, name: str, began_s: float, seconds: float, **attributes: Attribute) -> None:
        """A child that is over: began at `began_s` (monotonic), and took `seconds`."""


class Tracer(Protocol):
    """Makes spans."""

    def span(
        self, name: str, parent: str, kind: Kind = "internal", **attributes: Attribute
    ) -> Span:
        """A child of `parent`, a traceparent; without one there is nothing to trace."""

    def root(self, name: str, parent: str, **attributes: Attribute) -> Span:
        """A request's own span: begins a trace, or continues that of the client."""

    def close(self) -> None:
        """Send what is left."""


class _NoSpan:
    traceparent = ""

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing was begun."""

    def note(self, **attributes: Attribute) -> None:
        """Nobody listens."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Nobody listens."""

    def stage(self, name: str, began_s: float, seconds: float, **attributes: Attribute) -> None:
        """Nobody listens."""


class _NoTracer:
    def span(
        self, name: str, parent: str, kind: Kind = "internal", **attributes: Attribute
    ) -> Span:
        return NO_SPAN

    def root(self, name: str, parent: str, **attributes: Attribute) -> Span:
        return NO_SPAN

    def close(self) -> None:
        """Nothing was opened."""


NO_SPAN = _NoSpan()
NO_TRACER = _NoTracer()


def make_tracer(settings: Settings, role: str, replica: str) -> Tracer:
    """The tracer of one process.

    Raises:
        ConfigurationError: `otel_endpoint` is set, and OpenTelemetry is not installed.
    """
    if not settings.otel_endpoint:
        return NO_TRACER
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        raise ConfigurationError(
            f"otel_endpoint is set, but OpenTelemetry is not installed ({error}): "
            f"pip install 'splitscribe[otel]'"
        ) from error
    names = {"service.name": SERVICE, "service.instance.id": replica, f"{SERVICE}.role": role}
    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(settings.otel_ratio),
        resource=Resource.create(names),
        shutdown_on_exit=False,  # Serve ends replicas itself
    )
    endpoint = f"{settings.otel_endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    # Its warnings are one for each new try; the error is the one after the last.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    return OtelTracer(provider)


class OtelTracer:
    """Makes spans of OpenTelemetry's SDK, by a provider of its own."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)

    def span(
        self, name: str, parent: str, kind: Kind = "internal", **attributes: Attribute
    ) -> Span:
        return _OtelSpan(self._tracer, name, parent, kind, attributes) if parent else NO_SPAN

    def root(self, name: str, parent: str, **attributes: Attribute) -> Span:
        return _OtelSpan(self._tracer, name, parent, "server", attributes)

    def close(self) -> None:
        """Give up on a collector that does not answer: nobody's shutdown waits for it."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _OtelSpan:
    def __init__(
        self, tracer: Any, name: str, parent: str, kind: Kind, attributes: Mapping[str, Attribute]
    ) -> None:
        from opentelemetry.trace import SpanKind

        self._tracer = tracer
        self._span = tracer.start_span(
            name,
            context=_context_of(parent),
            kind=SpanKind[kind.upper()],
            attributes=_named(attributes),
        )
        own = self._span.get_span_context()
        self.traceparent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    def __enter__(self) -> _OtelSpan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, kind.__name__)
        self._span.end()

    def note(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, _named(attributes))

    def stage(self, name: str, began_s: float, seconds: float, **attributes: Attribute) -> None:
        if not self._span.is_recording():
            return
        began_ns = time.time_ns() - round((time.monotonic() - began_s) * 1e9)
        child = self._tracer.start_span(
            name,
            context=_context_of(self.traceparent),
            attributes=_named(attributes),
            start_time=began_ns,
        )
        child.end(began_ns + max(0, round(seconds * 1e9)))


def _context_of(traceparent: str) -> Context:
    """An empty context where it is none: never that of the task, which belongs to others."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """Our own attributes under our name; those of OpenTelemetry's conventions as they are."""
    return {
        name.replace("__", ".") if "__" in name else f"{SERVICE}.{name}": value
        for name, value in attributes.items()
    }
