"""What a simulation says: one JSON object of figures, made of its records.

Rates and shares are over the time in which requests came, without the first tenth, in which the
cluster fills up. Latencies are of the requests that came in that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cluster.planning.scenario.model import Scenario
from cluster.planning.simulation.records import Answers, Moment
from cluster.planning.simulation.run import Outcome

WARM_UP = 0.1  # of the load's seconds
PERCENTILES = (50, 95, 99)
SECONDS_PER_HOUR = 3600.0


def summary(outcome: Outcome, run_time_s: float) -> dict[str, Any]:
    """All figures; `run_time_s` is how long the simulation took on this machine."""
    scenario, records = outcome.scenario, outcome.records
    begin_s, end_s = WARM_UP * scenario.load.seconds, scenario.load.seconds
    classes = {
        name: _of_class(answers, scenario, begin_s, end_s)
        for name, answers in sorted(records.answers.items())
    }
    audio_s = sum(sum(answers.audio_s) for answers in records.answers.values())
    return {
        "profile": {
            "name": outcome.profile.name,
            "model": outcome.profile.model,
            "predicted": outcome.profile.predicted,
            "source": outcome.profile.source,
        },
        "scenario": scenario.model_dump(mode="json", exclude={"settings"}),
        "simulated_s": round(outcome.seconds, 3),
        "run_time_s": round(run_time_s, 2),
        "requests": records.n_requests,
        "us_per_request": round(1e6 * run_time_s / max(1, records.n_requests)),
        "goodput_per_s": round(sum(one["goodput_per_s"] for one in classes.values()), 3),
        "throughput_per_s": round(sum(one["throughput_per_s"] for one in classes.values()), 3),
        "audio_s_per_s": round(audio_s / max(outcome.seconds, 1e-9), 2),
        "classes": classes,
        "utilisation": _utilisation(records.moments, begin_s, end_s),
        "kv_traffic": {
            f"{source} -> {target}": {
                "reads": told.n_reads,
                "gigabytes": round(told.n_bytes / 1e9, 3),
                "mean_read_s": round(told.seconds / told.n_reads, 6),
            }
            for (source, target), told in sorted(outcome.traffic.items())
        },
        "retries": dict(sorted(records.retries.items())),
        "decisions": [asdict(noted) for noted in records.noted],
        "cost": _cost(outcome, audio_s),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, the nearest one; `values` in rising order."""
    return values[min(len(values) - 1, int(percent / 100 * len(values)))]


def _of_class(answers: Answers, scenario: Scenario, begin_s: float, end_s: float) -> dict[str, Any]:
    counted = [
        (audio_s, latency_s)
        for at_s, audio_s, latency_s in zip(
            answers.arrived_s, answers.audio_s, answers.latency_s, strict=True
        )
        if begin_s <= at_s < end_s
    ]
    latencies = sorted(latency_s for _, latency_s in counted)
    good = sum(latency_s <= scenario.slo.limit_s(audio_s) for audio_s, latency_s in counted)
    span_s = end_s - begin_s
    found: dict[str, Any] = {
        "answered": len(answers.latency_s),
        "failed": dict(sorted(answers.failures.items())),
        "throughput_per_s": round(len(counted) / span_s, 3),
        "goodput_per_s": round(good / span_s, 3),
        "within_slo": round(good / len(counted), 4) if counted else 0.0,
    }
    if latencies:
        found |= {
            f"p{percent}_s": round(percentile(latencies, percent), 4) for percent in PERCENTILES
        }
    return found


def _utilisation(moments: Sequence[Moment], begin_s: float, end_s: float) -> dict[str, float]:
    """Means over the time, and the highest number of requests that were pending."""
    seen = [moment for moment in moments if begin_s < moment.at_s <= end_s] or list(moments)
    if not seen:
        return {}
    names = (
        "encoders",
        "decoders",
        "encoder_busy",
        "decoder_busy",
        "encoder_pages",
        "decoder_pages",
        "encoder_queue",
        "decoder_waiting",
    )
    means = {name: round(sum(getattr(one, name) for one in seen) / len(seen), 4) for name in names}
    return means | {"most_pending": max(moment.pending for moment in seen)}


def _cost(outcome: Outcome, audio_s: float) -> dict[str, float]:
    """Worker hours, and where a price is given, dollars for an hour of audio."""
    hours = sum(outcome.worker_seconds.values()) / SECONDS_PER_HOUR
    price = outcome.scenario.cluster.dollars_per_hour
    found = {"worker_hours": round(hours, 4)}
    if price and audio_s:
        audio_hours = audio_s / SECONDS_PER_HOUR
        found["dollars_per_audio_hour"] = round(price * hours / audio_hours, 5)
    return found
