"""OpenTelemetry's traces: one per request, with a span for each stage and each hand-off.

Without `otel_endpoint` spans do nothing, and messages carry an empty `traceparent` (W3C Trace
Context). Of what a client sent a span holds the request id alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.common.errors import ConfigurationError
from cluster.common.extras import install_command
from cluster.common.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Kind = Literal["server", "client", "internal"]
Attribute = str | int | float | bool

SERVICE = "splitscribe"
EXPORT_TIMEOUT_S = 5.0
CLOSE_S = 2.0  # for what is left to be sent

W3C = TraceContextTextMapPropagator()


class Span:
    """A span as a context manager, which notes an exception that leaves it."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        carrier: dict[str, str] = {}
        W3C.inject(carrier, trace.set_span_in_context(span, Context()))
        # What children name as their parent; empty where nothing is traced.
        self.traceparent = carrier.get("traceparent", "")

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._span.set_status(trace.StatusCode.ERROR, kind.__name__)
        self._span.end()

    def end(self, error: BaseException | None = None) -> None:
        """End a span that is no context manager's; only the first end counts."""
        if self._span.is_recording():
            self.__exit__(None if error is None else type(error), error, None)

    def note(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, _named(attributes))

    def stage(self, name: str, began_s: float, seconds: float, **attributes: Attribute) -> None:
        """Add a child that has ended: it began at `began_s` (monotonic) and took `seconds`."""
        if not self._span.is_recording():
            return
        began_ns = time.time_ns() - round((time.monotonic() - began_s) * 1e9)
        child = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(self._span, Context()),
            attributes=_named(attributes),
            start_time=began_ns,
        )
        child.end(began_ns + max(0, round(seconds * 1e9)))


NO_SPAN = Span(trace.NoOpTracer(), trace.INVALID_SPAN)


class Tracer:
    """Makes spans by a provider of OpenTelemetry's SDK; without one nothing is traced."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE) if provider else None

    def span(
        self, name: str, parent: str, kind: Kind = "internal", **attributes: Attribute
    ) -> Span:
        """A child of `parent`, a traceparent; if that is empty nothing is traced."""
        return self._started(name, parent, kind, attributes) if parent else NO_SPAN

    def root(self, name: str, parent: str, **attributes: Attribute) -> Span:
        """A request's own span: begins a trace, or continues that of the client."""
        return self._started(name, parent, "server", attributes)

    def _started(
        self, name: str, parent: str, kind: Kind, attributes: Mapping[str, Attribute]
    ) -> Span:
        if self._tracer is None:
            return NO_SPAN
        span = self._tracer.start_span(
            name,
            # Never the task's current context, which may belong to another trace.
            context=W3C.extract({"traceparent": parent}, Context()),
            kind=trace.SpanKind[kind.upper()],
            attributes=_named(attributes),
        )
        return Span(self._tracer, span)

    def close(self) -> None:
        """Send what is left, within CLOSE_S."""
        if self._provider is None:
            return
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


NO_TRACER = Tracer()


def make_tracer(settings: Settings, role: str, replica: str) -> Tracer:
    """Raises ConfigurationError if OpenTelemetry's exporter is needed and not installed."""
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
            f"otel_endpoint is set, but its exporter is not installed ({error}): "
            f"{install_command('otel')}"
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
    return Tracer(provider)


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """Put our prefix before names; `__` stands for the dots in OpenTelemetry's own names."""
    return {
        name.replace("__", ".") if "__" in name else f"{SERVICE}.{name}": value
        for name, value in attributes.items()
    }
