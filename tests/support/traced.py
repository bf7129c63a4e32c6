"""A tracer whose spans stay here, to be looked at."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from cluster.common.tracing import Tracer


class Traced:
    def __init__(self, ratio: float = 1.0) -> None:
        self._memory = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(ratio))
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer = Tracer(provider)

    def all(self) -> tuple[ReadableSpan, ...]:
        return self._memory.get_finished_spans()

    def spans(self) -> dict[str, ReadableSpan]:
        found = self.all()
        names = [span.name for span in found]
        assert len(set(names)) == len(names), names
        return dict(zip(names, found, strict=True))


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id
