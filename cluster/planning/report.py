"""What a simulation says: one JSON object of figures, made of its records, and a page of them.

Rates and shares are over the time in which requests came, without the first tenth, in which the
cluster fills up. Latencies are of the requests that came in that time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from cluster.planning.scenario import Scenario
from cluster.planning.simulation.parts import Answers, Moment
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


WIDTH, HEIGHT, LEFT, FOOT = 860, 170, 60, 26
MOST_POINTS = 800
STYLE = """
  body { font: 15px system-ui, sans-serif; max-width: 900px; margin: 2rem auto; padding: 0 1rem;
         color: #1f2328; background: #ffffff }
  table { border-collapse: collapse } td, th { padding: 3px 14px 3px 0; text-align: left }
  svg text { font-size: 12px; fill: currentColor } .grid { stroke: #d0d7de }
  .a { stroke: #0969da; fill: none } .b { stroke: #bc4c00; fill: none }
  .warn { border-left: 4px solid #bc4c00; padding-left: 10px }
  @media (prefers-color-scheme: dark) { body { color: #f0f6fc; background: #0d1117 }
    .grid { stroke: #3d444d } .a { stroke: #4493f8 } .b { stroke: #f0883e } }
"""
Series = tuple[str, str, list[float]]  # class of its line, name, values


def page(outcome: Outcome, figures: dict[str, Any]) -> str:
    """The whole file."""
    moments = _thinned(outcome.records.moments)
    profile = outcome.profile
    kind = "predicted, not measured" if profile.predicted else "measured"
    parts = [
        f"<h1>Simulation of {escape(profile.model)} on {escape(profile.name)}</h1>",
        f'<p class="warn">The profile is {kind}: {escape(profile.source)}</p>',
        *_table("Result", _head(figures)),
        *_table("Utilisation, means", figures["utilisation"]),
        _chart("Busy share", moments, ("encoder_busy", "encoders"), ("decoder_busy", "decoders")),
        _chart("Pages in use", moments, ("encoder_pages", "export"), ("decoder_pages", "decode")),
        _chart("Workers", moments, ("encoders", "encoders"), ("decoders", "decoders")),
        _chart("Pending requests", moments, ("pending", "requests")),
        *_decisions(figures["decisions"]),
        "<h2>All figures</h2>",
        f"<pre>{escape(json.dumps(figures, indent=1))}</pre>",
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>splitscribe simulate</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _head(figures: dict[str, Any]) -> dict[str, Any]:
    """The first rows: what was asked for, and what came of it."""
    rows = {
        "requests": figures["requests"],
        "goodput, requests/s within the objective": figures["goodput_per_s"],
        "answered, requests/s": figures["throughput_per_s"],
        "seconds of audio per second": figures["audio_s_per_s"],
        "this simulation ran for, s": figures["run_time_s"],
    }
    for name, found in figures["classes"].items():
        times = ", ".join(f"{found.get(f'p{p}_s', 0):g}" for p in (50, 95, 99))
        rows[f"{name}: p50, p95, p99 in s"] = times
        if found["failed"]:
            rows[f"{name}: failed"] = ", ".join(
                f"{n} x {why}" for why, n in found["failed"].items()
            )
    return rows


def _table(title: str, rows: dict[str, Any]) -> Iterator[str]:
    yield f"<h2>{escape(title)}</h2><table>"
    for name, value in rows.items():
        yield f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
    yield "</table>"


def _decisions(decisions: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not decisions:
        return
    yield "<h2>Decisions</h2><table><tr><th>at s</th><th>what</th><th>why</th></tr>"
    for one in decisions:
        cells = (f"{one['at_s']:g}", one["what"], one["why"])
        yield "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _chart(title: str, moments: Sequence[Moment], *names: tuple[str, str]) -> str:
    """Lines of some of the moments' fields over time, from 0 to their highest value."""
    series: list[Series] = [
        (kind, name, [float(getattr(moment, field)) for moment in moments])
        for kind, (field, name) in zip("ab", names, strict=False)
    ]
    top = max((max(values, default=0.0) for _, _, values in series), default=0.0) or 1.0
    end_s = moments[-1].at_s if moments else 1.0
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _y(share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{top * share:.3g}</text>'
        )
    for number, (kind, name, values) in enumerate(series):
        points = " ".join(
            f"{LEFT + (WIDTH - LEFT) * moment.at_s / max(end_s, 1e-9):.1f},{_y(value / top):.1f}"
            for moment, value in zip(moments, values, strict=True)
        )
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
        colour = "blue" if kind == "a" else "orange"
        x = LEFT + 200 * number
        parts.append(f'<text x="{x}" y="{HEIGHT - 4}">{escape(name)} ({colour})</text>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">until {end_s:.0f} s</text>')
    return (
        f"<h2>{escape(title)}</h2>\n"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _y(share: float) -> float:
    return HEIGHT - FOOT - (HEIGHT - FOOT - 10) * share


def _thinned(moments: Sequence[Moment]) -> list[Moment]:
    every = max(1, -(-len(moments) // MOST_POINTS))
    return list(moments[::every])
