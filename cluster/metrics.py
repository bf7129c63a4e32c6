"""Names, units, help texts and buckets of every metric, and a small recorder for each role.

Ray exports each of them as `ray_<name>`, tagged by deployment, replica and application. A role
calls `Recorder` methods; outside of a Serve replica the recorder is a no-op, so that engines
never ask where they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its exported name, kind, help text, extra tags and histogram bounds."""

    name: str
    kind: Kind
    help: str
    tags: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


ROUTER_METRICS = (
    MetricSpec("splitscribe_requests_total", "counter", "Requests answered", ("status",)),
    MetricSpec("splitscribe_request_seconds", "histogram", "Request wall time", (), _SECONDS),
    MetricSpec("splitscribe_audio_seconds_total", "counter", "Seconds of audio transcribed"),
    MetricSpec("splitscribe_pending_audio_seconds", "gauge", "Audio-seconds admitted, unanswered"),
    MetricSpec("splitscribe_windows_total", "counter", "Windows finished"),
    MetricSpec("splitscribe_window_retries_total", "counter", "Tries repeated", ("reason",)),
    MetricSpec("splitscribe_audio_decode_seconds", "histogram", "Upload to PCM", (), _SECONDS),
)

ENCODER_METRICS = (
    MetricSpec("splitscribe_encoder_queue_windows", "gauge", "Windows waiting to be encoded"),
    MetricSpec("splitscribe_encoder_queue_audio_seconds", "gauge", "Audio-seconds waiting"),
    MetricSpec("splitscribe_encoder_queue_seconds", "histogram", "Wait of a window", (), _SECONDS),
    MetricSpec("splitscribe_encoder_batch_windows", "histogram", "Batch size", (), _BATCH),
    MetricSpec("splitscribe_encode_seconds", "histogram", "Time of a batch", (), _SECONDS),
    MetricSpec("splitscribe_export_pages_free", "gauge", "Free pages of the export pool"),
    MetricSpec("splitscribe_export_leases", "gauge", "Published windows not yet released"),
)

DECODER_METRICS = (
    MetricSpec("splitscribe_decoder_waiting", "gauge", "Sequences waiting for pages"),
    MetricSpec("splitscribe_decoder_loading", "gauge", "Sequences whose KV is in flight"),
    MetricSpec("splitscribe_decoder_running", "gauge", "Sequences in the running batch"),
    MetricSpec("splitscribe_kv_pages_free", "gauge", "Free pages of the cross-KV pool"),
    MetricSpec("splitscribe_kv_pages_quarantined", "gauge", "Pages a late READ may write to"),
    MetricSpec("splitscribe_kv_transfer_bytes_total", "counter", "KV bytes read", ("transport",)),
    MetricSpec(
        "splitscribe_kv_transfer_seconds", "histogram", "READ and check", ("transport",), _SECONDS
    ),
    MetricSpec("splitscribe_kv_transfer_gb_per_second", "gauge", "Mean rate of a READ, 10^9 B/s"),
    MetricSpec("splitscribe_decode_queue_seconds", "histogram", "Wait of a sequence", (), _SECONDS),
    MetricSpec("splitscribe_decode_seconds", "histogram", "Steps of a sequence", (), _SECONDS),
    MetricSpec("splitscribe_decode_steps_total", "counter", "Decode steps run"),
    MetricSpec("splitscribe_decode_step_seconds", "histogram", "Mean step", (), _SECONDS),
    MetricSpec("splitscribe_tokens_total", "counter", "Tokens sampled"),
)


class Recorder:
    """Sets, adds and observes metrics by name; unknown names are a programming error."""

    def __init__(self, specs: tuple[MetricSpec, ...], make: Callable[[MetricSpec], Any]) -> None:
        self._metrics: Mapping[str, tuple[MetricSpec, Any]] = {
            spec.name: (spec, make(spec)) for spec in specs
        }

    def add(self, name: str, value: float = 1.0, **tags: str) -> None:
        if value > 0:
            self._metrics[name][1].inc(value, tags=tags or None)

    def set(self, name: str, value: float, **tags: str) -> None:
        self._metrics[name][1].set(value, tags=tags or None)

    def observe(self, name: str, value: float, **tags: str) -> None:
        self._metrics[name][1].observe(value, tags=tags or None)


def serve_recorder(specs: tuple[MetricSpec, ...]) -> Recorder:
    """A recorder that exports through Ray Serve; call it inside a replica."""
    from ray.serve import metrics as serve_metrics

    def make(spec: MetricSpec) -> Any:
        common: dict[str, Any] = {"description": spec.help, "tag_keys": spec.tags or None}
        if spec.kind == "counter":
            return serve_metrics.Counter(spec.name, **common)
        if spec.kind == "gauge":
            return serve_metrics.Gauge(spec.name, **common)
        return serve_metrics.Histogram(spec.name, boundaries=list(spec.bounds), **common)

    return Recorder(specs, make)


class _Silent:
    def inc(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count nothing."""

    set = observe = inc


def silent_recorder(specs: tuple[MetricSpec, ...]) -> Recorder:
    """A recorder for use outside of Ray."""
    return Recorder(specs, lambda spec: _Silent())
