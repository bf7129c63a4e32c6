"""Names, units, help texts and buckets of every metric, and a small recorder for each role.

Ray exports each of them as `ray_<name>`, tagged by deployment, replica and application. A role
calls `Recorder` methods; outside of a Serve replica the recorder is a no-op, so that engines
never ask where they run. `configs/observability` shows them: what is added here belongs there too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

logger = logging.getLogger(__name__)

REPORT_PERIOD_S = 1.0

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 600.0)
_SHORT_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0)
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
    MetricSpec(
        "splitscribe_errors_total",
        "counter",
        "Requests that ended in an error, streams that broke after a 200 included",
        ("status", "code"),
    ),
    MetricSpec("splitscribe_request_seconds", "histogram", "Request wall time", (), _SECONDS),
    MetricSpec("splitscribe_upload_seconds", "histogram", "Reading of the form", (), _SECONDS),
    MetricSpec("splitscribe_pending_requests", "gauge", "Requests admitted, unanswered"),
    MetricSpec("splitscribe_pending_audio_seconds", "gauge", "Audio-seconds admitted, unanswered"),
    MetricSpec("splitscribe_max_pending_audio_seconds", "gauge", "Above it requests get a 503"),
    MetricSpec("splitscribe_audio_seconds_total", "counter", "Seconds of audio that came in"),
    MetricSpec("splitscribe_transcripts_total", "counter", "Requests transcribed to their end"),
    MetricSpec(
        "splitscribe_transcribed_audio_seconds_total", "counter", "Seconds of audio in transcripts"
    ),
    MetricSpec("splitscribe_windows_total", "counter", "Windows finished"),
    MetricSpec("splitscribe_window_retries_total", "counter", "Tries repeated", ("reason",)),
    MetricSpec("splitscribe_audio_decode_seconds", "histogram", "Upload to PCM", (), _SECONDS),
    MetricSpec(
        "splitscribe_hop_seconds",
        "histogram",
        "Call of a worker, less the time that it had the window",
        ("role",),
        _SHORT_SECONDS,
    ),
)

ENCODER_METRICS = (
    MetricSpec("splitscribe_encoder_queue_windows", "gauge", "Windows waiting to be encoded"),
    MetricSpec("splitscribe_encoder_queue_audio_seconds", "gauge", "Audio-seconds waiting"),
    MetricSpec("splitscribe_encoder_running_windows", "gauge", "Windows being encoded"),
    MetricSpec("splitscribe_encoder_queue_seconds", "histogram", "Wait of a window", (), _SECONDS),
    MetricSpec("splitscribe_encoder_batch_windows", "histogram", "Batch size", (), _BATCH),
    MetricSpec("splitscribe_encode_seconds", "histogram", "Time of a batch", (), _SECONDS),
    MetricSpec("splitscribe_encoder_busy_seconds_total", "counter", "Time spent on batches"),
    MetricSpec(
        "splitscribe_encoder_failed_windows_total", "counter", "Windows not encoded", ("reason",)
    ),
    MetricSpec("splitscribe_export_pages", "gauge", "Pages of the export pool"),
    MetricSpec("splitscribe_export_pages_free", "gauge", "Free pages of the export pool"),
    MetricSpec("splitscribe_export_leases", "gauge", "Published windows not yet released"),
    MetricSpec("splitscribe_expired_leases_total", "counter", "Leases that nobody renewed"),
    MetricSpec(
        "splitscribe_refused_notifications_total",
        "counter",
        "Notifications of no lease, or in no form that we know",
        ("reason",),
    ),
)

DECODER_METRICS = (
    MetricSpec("splitscribe_decoder_waiting", "gauge", "Sequences waiting for pages"),
    MetricSpec("splitscribe_decoder_loading", "gauge", "Sequences whose KV is in flight"),
    MetricSpec("splitscribe_decoder_running", "gauge", "Sequences in the running batch"),
    MetricSpec("splitscribe_kv_pages", "gauge", "Pages of the cross-KV pool"),
    MetricSpec("splitscribe_kv_pages_free", "gauge", "Free pages of the cross-KV pool"),
    MetricSpec("splitscribe_kv_pages_quarantined", "gauge", "Pages a late READ may write to"),
    MetricSpec("splitscribe_kv_transfer_bytes_total", "counter", "KV bytes read", ("transport",)),
    MetricSpec(
        "splitscribe_kv_transfer_seconds",
        "histogram",
        "READ and check",
        ("transport",),
        _SHORT_SECONDS,
    ),
    MetricSpec("splitscribe_decode_queue_seconds", "histogram", "Wait of a sequence", (), _SECONDS),
    MetricSpec("splitscribe_prefill_seconds", "histogram", "Prompts of a sequence", (), _SECONDS),
    MetricSpec("splitscribe_decode_seconds", "histogram", "Steps of a sequence", (), _SECONDS),
    MetricSpec("splitscribe_decode_steps_total", "counter", "Decode steps run"),
    MetricSpec("splitscribe_decode_step_seconds", "histogram", "Mean step", (), _SHORT_SECONDS),
    MetricSpec("splitscribe_decoder_busy_seconds_total", "counter", "Time spent on forwards"),
    MetricSpec("splitscribe_tokens_total", "counter", "Tokens sampled"),
    MetricSpec("splitscribe_decode_fallbacks_total", "counter", "Attempts beyond the first"),
    MetricSpec("splitscribe_failed_sequences_total", "counter", "Sequences that failed"),
    MetricSpec("splitscribe_refused_handles_total", "counter", "KV handles not taken", ("reason",)),
)

CONTROLLER_METRICS = (  # of Serve's controller, which decides how many workers there are
    MetricSpec(
        "splitscribe_autoscaling_decisions_total",
        "counter",
        "Changes of a pool's size",
        ("pool", "model", "direction", "reason"),
    ),
    MetricSpec(
        "splitscribe_autoscaling_target_workers",
        "gauge",
        "Workers that the last change asked for",
        ("pool", "model"),
    ),
)


class Recorder:
    """Sets, adds and observes metrics by name; unknown names are a programming error."""

    def __init__(self, specs: tuple[MetricSpec, ...], make: Callable[[MetricSpec], Any]) -> None:
        self._metrics: Mapping[str, tuple[MetricSpec, Any]] = {
            spec.name: (spec, make(spec)) for spec in specs
        }
        self._totals: dict[tuple[str, ...], float] = {}  # told so far, by name and tags

    def add(self, name: str, value: float = 1.0, **tags: str) -> None:
        if value > 0:
            self._metrics[name][1].inc(value, tags=tags or None)

    def total(self, name: str, total: float, **tags: str) -> None:
        """Bring a counter up to `total`, which somebody else counts; one caller per counter."""
        key = (name, *tags.values())
        self.add(name, total - self._totals.get(key, 0.0), **tags)
        self._totals[key] = total

    def set(self, name: str, value: float, **tags: str) -> None:
        self._metrics[name][1].set(value, tags=tags or None)

    def observe(self, name: str, value: float, **tags: str) -> None:
        self._metrics[name][1].observe(value, tags=tags or None)


def serve_recorder(specs: tuple[MetricSpec, ...]) -> Recorder:
    """A recorder that exports through Ray Serve; call it inside a replica."""
    from ray.serve import metrics as serve_metrics

    return _exporting(specs, serve_metrics)


def ray_recorder(specs: tuple[MetricSpec, ...]) -> Recorder:
    """A recorder that exports through Ray, from any of its processes."""
    from ray.util import metrics as ray_metrics

    return _exporting(specs, ray_metrics)


def _exporting(specs: tuple[MetricSpec, ...], metrics: Any) -> Recorder:
    def make(spec: MetricSpec) -> Any:
        common: dict[str, Any] = {"description": spec.help, "tag_keys": spec.tags or None}
        if spec.kind == "counter":
            return metrics.Counter(spec.name, **common)
        if spec.kind == "gauge":
            return metrics.Gauge(spec.name, **common)
        return metrics.Histogram(spec.name, boundaries=list(spec.bounds), **common)

    return Recorder(specs, make)


class _Silent:
    def inc(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count nothing."""

    set = observe = inc


def silent_recorder(specs: tuple[MetricSpec, ...]) -> Recorder:
    """A recorder for use outside of Ray."""
    return Recorder(specs, lambda spec: _Silent())


async def report_each_second(record: Callable[[], None]) -> None:
    """Have `record` tell its state until cancelled; should it fail, that is logged, not fatal."""
    while True:
        try:
            record()
        except Exception:
            logger.exception("reading the state for the metrics failed")
        await asyncio.sleep(REPORT_PERIOD_S)
