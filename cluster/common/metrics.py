"""Names, help texts and buckets of every metric, and a recorder for each role.

Ray exports each as `ray_<name>`, tagged by deployment, replica and application; a router also has
its own at `/metrics`. What is added here belongs in `configs/observability`, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

logger = logging.getLogger(__name__)

REPORT_PERIOD_S = 1.0

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 600.0)
_SHORT_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0)
_DELAYS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0, 3.0, 5.0, 10.0, 30.0)
_BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    name: str
    kind: Kind
    help: str
    tags: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def counter(name: str, help: str, *tags: str) -> MetricSpec:
    return MetricSpec(name, "counter", help, tags)


def gauge(name: str, help: str, *tags: str) -> MetricSpec:
    return MetricSpec(name, "gauge", help, tags)


def histogram(name: str, help: str, bounds: tuple[float, ...], *tags: str) -> MetricSpec:
    return MetricSpec(name, "histogram", help, tags, bounds)


ROUTER_METRICS = (
    counter("splitscribe_requests_total", "Requests answered", "status"),
    counter(
        "splitscribe_errors_total",
        "Requests that ended in an error, streams that broke after a 200 included",
        "status",
        "code",
    ),
    histogram("splitscribe_request_seconds", "Request wall time", _SECONDS),
    histogram("splitscribe_upload_seconds", "Reading of the form", _SECONDS),
    gauge("splitscribe_pending_requests", "Requests admitted, unanswered"),
    gauge("splitscribe_pending_audio_seconds", "Audio-seconds admitted, unanswered"),
    gauge("splitscribe_max_pending_audio_seconds", "Above it requests get a 429"),
    counter("splitscribe_audio_seconds_total", "Seconds of audio that came in"),
    counter("splitscribe_transcripts_total", "Requests transcribed to their end"),
    counter("splitscribe_transcribed_audio_seconds_total", "Seconds of audio in transcripts"),
    counter("splitscribe_windows_total", "Windows finished"),
    counter("splitscribe_trimmed_windows_total", "Windows first encoded in a trimmed context"),
    counter("splitscribe_doubted_windows_total", "Of them those encoded once more in full"),
    counter("splitscribe_window_retries_total", "Tries repeated", "reason"),
    histogram("splitscribe_audio_decode_seconds", "Upload to PCM", _SECONDS),
    histogram(
        "splitscribe_hop_seconds",
        "Call of a worker, less the time that it had the window",
        _SHORT_SECONDS,
        "role",
    ),
    counter("splitscribe_key_requests_total", "Requests of an API key, by its name", "key"),
    counter("splitscribe_key_audio_seconds_total", "Seconds of audio transcribed for it", "key"),
    gauge("splitscribe_live_sessions", "Live sessions that are open"),
    gauge("splitscribe_live_hop_seconds", "Time between two updates of a session, by load"),
    counter("splitscribe_live_refused_total", "Live sessions refused for want of room", "code"),
    counter("splitscribe_live_updates_total", "Updates of live sessions", "outcome"),
    histogram("splitscribe_live_update_seconds", "Call of an update to its answer", _SECONDS),
    histogram("splitscribe_live_word_delay_seconds", "A word in the audio to its delta", _DELAYS),
    counter("splitscribe_live_turns_total", "Turns of live sessions that ended", "outcome"),
    counter("splitscribe_live_audio_seconds_total", "Seconds of audio in those turns"),
)

ENCODER_METRICS = (
    gauge("splitscribe_encoder_queue_windows", "Windows waiting to be encoded"),
    gauge("splitscribe_encoder_queue_audio_seconds", "Audio-seconds waiting"),
    gauge("splitscribe_encoder_running_windows", "Windows being encoded"),
    histogram("splitscribe_encoder_queue_seconds", "Wait of a window", _SECONDS),
    histogram("splitscribe_encoder_batch_windows", "Batch size", _BATCH),
    histogram("splitscribe_encode_seconds", "Time of a batch", _SECONDS),
    counter("splitscribe_encoder_busy_seconds_total", "Time spent on batches"),
    counter("splitscribe_encoder_failed_windows_total", "Windows not encoded", "reason"),
    gauge("splitscribe_export_pages", "Pages of the export pool"),
    gauge("splitscribe_export_pages_free", "Free pages of the export pool"),
    gauge("splitscribe_export_leases", "Published windows not yet released"),
    counter("splitscribe_cache_windows_total", "Windows whose KV may be reused", "result"),
    counter("splitscribe_cache_evictions_total", "Kept windows that gave way to others"),
    gauge("splitscribe_cache_kept_windows", "Windows kept in pages that count as free"),
    gauge("splitscribe_cache_kept_bytes", "Bytes of those pages"),
    counter("splitscribe_expired_leases_total", "Leases that nobody renewed"),
    counter(
        "splitscribe_refused_notifications_total",
        "Notifications of no lease, or in no form that we know",
        "reason",
    ),
)

DECODER_METRICS = (
    gauge("splitscribe_decoder_waiting", "Sequences waiting for pages"),
    gauge("splitscribe_decoder_loading", "Sequences whose KV is in flight"),
    gauge("splitscribe_decoder_running", "Sequences in the running batch"),
    gauge("splitscribe_kv_pages", "Pages of the cross-KV pool"),
    gauge("splitscribe_kv_pages_free", "Free pages of the cross-KV pool"),
    gauge("splitscribe_kv_pages_quarantined", "Pages a late READ may write to"),
    counter("splitscribe_kv_transfer_bytes_total", "KV bytes read", "transport"),
    histogram("splitscribe_kv_transfer_seconds", "READ and check", _SHORT_SECONDS, "transport"),
    histogram("splitscribe_decode_queue_seconds", "Wait of a sequence", _SECONDS),
    histogram("splitscribe_prefill_seconds", "Prompts of a sequence", _SECONDS),
    histogram("splitscribe_decode_seconds", "First token to answer of a sequence", _SECONDS),
    counter("splitscribe_decode_steps_total", "Decode steps run"),
    histogram("splitscribe_decode_step_seconds", "Decode seconds per step", _SHORT_SECONDS),
    counter("splitscribe_decoder_busy_seconds_total", "Time spent on forwards"),
    counter("splitscribe_tokens_total", "Tokens sampled"),
    counter("splitscribe_decode_fallbacks_total", "Attempts beyond the first"),
    counter("splitscribe_failed_sequences_total", "Sequences that failed"),
    counter("splitscribe_refused_handles_total", "KV handles not taken", "reason"),
)

BATCH_METRICS = (  # of the one process that owns files and batches
    gauge("splitscribe_batches_open", "Batches that have not ended"),
    gauge("splitscribe_batches_paused", "1 while the disk is too full to run lines, else 0"),
    counter("splitscribe_batches_total", "Batches that ended", "status"),
    gauge("splitscribe_batch_lines_waiting", "Lines of batches that wait"),
    gauge("splitscribe_batch_lines_running", "Lines that are being transcribed"),
    counter("splitscribe_batch_lines_total", "Lines run to their end", "outcome"),
    gauge("splitscribe_batch_files", "Files that are kept"),
    gauge("splitscribe_batch_files_bytes", "Bytes of those files"),
    gauge("splitscribe_batch_disk_free_bytes", "Bytes free on their disk"),
    counter("splitscribe_batch_webhooks_total", "Tries to deliver a webhook", "outcome"),
)

CONTROLLER_METRICS = (  # of Serve's controller, which decides how many workers there are
    counter(
        "splitscribe_autoscaling_decisions_total",
        "Changes of a pool's size",
        "pool",
        "model",
        "direction",
        "reason",
    ),
    gauge(
        "splitscribe_autoscaling_target_workers",
        "Workers that the last change asked for",
        "pool",
        "model",
    ),
)


class Recorder:
    def __init__(self, specs: tuple[MetricSpec, ...], make: Callable[[MetricSpec], Any]) -> None:
        self._specs = specs
        self._metrics: dict[str, list[Any]] = {spec.name: [] for spec in specs}  # see `tell_also`
        self._totals: dict[tuple[str, ...], float] = {}  # told so far, by name and tags
        self.tell_also(make)

    def tell_also(self, make: Callable[[MetricSpec], Any]) -> None:
        for spec in self._specs:
            self._metrics[spec.name].append(make(spec))

    def add(self, name: str, value: float = 1.0, **tags: str) -> None:
        for metric in self._metrics[name] if value > 0 else ():
            metric.inc(value, tags=tags or None)

    def total(self, name: str, total: float, **tags: str) -> None:
        """Bring a counter up to `total`, which is counted elsewhere; one caller per counter."""
        key = (name, *tags.values())
        self.add(name, total - self._totals.get(key, 0.0), **tags)
        self._totals[key] = total

    def set(self, name: str, value: float, **tags: str) -> None:
        for metric in self._metrics[name]:
            metric.set(value, tags=tags or None)

    def observe(self, name: str, value: float, **tags: str) -> None:
        for metric in self._metrics[name]:
            metric.observe(value, tags=tags or None)


def serve_recorder(specs: tuple[MetricSpec, ...]) -> Recorder:
    """Exports through Ray Serve; call it inside a replica."""
    from ray.serve import metrics

    return Recorder(specs, partial(_exported, metrics))


def ray_recorder(specs: tuple[MetricSpec, ...]) -> Recorder:
    """Exports through Ray, from any of its processes."""
    from ray.util import metrics

    return Recorder(specs, partial(_exported, metrics))


def _exported(metrics: Any, spec: MetricSpec) -> Any:
    bounds = {"boundaries": list(spec.bounds)} if spec.bounds else {}
    make = getattr(metrics, spec.kind.capitalize())
    return make(spec.name, description=spec.help, tag_keys=spec.tags or None, **bounds)


class _Silent:
    def inc(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count nothing."""

    set = observe = inc


def silent_recorder(specs: tuple[MetricSpec, ...]) -> Recorder:
    return Recorder(specs, lambda spec: _Silent())


async def report_each_second(record: Callable[[], None]) -> None:
    """Call `record` until cancelled; its errors are logged."""
    while True:
        try:
            record()
        except Exception:
            logger.exception("reading the state for the metrics failed")
        await asyncio.sleep(REPORT_PERIOD_S)
