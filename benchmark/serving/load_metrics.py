"""What a load run comes to, in the lines and the JSON keys of `vllm bench serve`.

Rates are of requests that succeeded over the whole run; latencies run from sending to the last
byte, so waiting inside the client is not among them and has figures of its own. Knows outcomes,
nothing of how they were got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.shared.openai_client import Outcome

WIDTH = 50
NAMES = {  # key: short name, heading
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
SLO_KEYS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of a run: how much audio it had, and what became of it."""

    audio_s: float
    outcome: Outcome

    @property
    def n_tokens(self) -> int:
        """The server's count; where it has none, the pieces in which the text came."""
        outcome = self.outcome
        if outcome.output_tokens is not None:
            return outcome.output_tokens
        return 0 if outcome.ttft is None else 1 + len(outcome.itls)

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None where the text came in one piece."""
        if self.outcome.ttft is None or not self.outcome.itls or self.n_tokens < 2:
            return None
        return (self.outcome.latency - self.outcome.ttft) / (self.n_tokens - 1)

    def keeps(self, slo_ms: Mapping[str, float]) -> bool:
        """Whether every latency that was asked for is within its limit."""
        times = {"ttft": self.outcome.ttft, "tpot": self.tpot, "e2el": self.outcome.latency}
        return all(1000 * (times[key] or 0.0) <= limit for key, limit in slo_ms.items())


def parse_goodput(pairs: Sequence[str] | None) -> dict[str, float]:
    """`ttft:500 e2el:2000` as key to ms.

    Raises:
        SystemExit: a pair is not like that.
    """
    limits: dict[str, float] = {}
    for pair in pairs or ():
        key, _, value = pair.partition(":")
        try:
            limits[key] = float(value)
        except ValueError:
            limits = {}
        if key not in SLO_KEYS or not limits or limits[key] < 0:
            raise SystemExit(f"--goodput takes ttft:MS, tpot:MS and e2el:MS, not {pair!r}")
    return limits


def summary(
    sent: Sequence[Sent],
    duration_s: float,
    slo_ms: Mapping[str, float],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """All figures by their key; a latency that nothing could be measured of is None."""
    good = [one for one in sent if not one.outcome.failure]
    outcomes = [one.outcome for one in good]
    n_output = sum(one.n_tokens for one in good)
    n_input = sum(outcome.input_tokens or 0 for outcome in outcomes)
    by_server = all(outcome.output_tokens is not None for outcome in outcomes)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(sent) - len(good),
        "failures": dict(Counter(s.outcome.failure for s in sent if s.outcome.failure)),
        "total_input_tokens": n_input,
        "total_output_tokens": n_output,
        "tokens_counted_by": "server" if by_server else "stream events" if n_output else None,
        "request_throughput": len(good) / duration_s,
        "request_goodput": sum(s.keeps(slo_ms) for s in good) / duration_s if slo_ms else None,
        "output_throughput": n_output / duration_s,
        "total_token_throughput": (n_input + n_output) / duration_s,
        "max_output_tokens_per_s": _busiest_second(outcomes),
        "max_concurrent_requests": _most_at_once(outcomes),
        "rtfx": sum(one.audio_s for one in good) / duration_s,
    }
    times = {
        "ttft": [o.ttft for o in outcomes if o.ttft is not None],
        "tpot": [s.tpot for s in good if s.tpot is not None],
        "itl": [gap for outcome in outcomes for gap in outcome.itls],
        "e2el": [outcome.latency for outcome in outcomes],
        "client_queue_time": [outcome.queue for outcome in outcomes],
        "e2el_including_client_queue": [o.latency + o.queue for o in outcomes],
    }
    for key, seconds in times.items():
        result |= _statistics(key, seconds, percentiles)
    return result


def details(sent: Sequence[Sent]) -> dict[str, Any]:
    """One value a request, in the order of their arrival."""
    outcomes = [one.outcome for one in sent]
    return {
        "input_lens": [outcome.input_tokens or 0 for outcome in outcomes],
        "output_lens": [one.n_tokens for one in sent],
        "audio_lens_s": [one.audio_s for one in sent],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "queue_times": [outcome.queue for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [f"{o.failure}: {o.error}" if o.failure else "" for o in outcomes],
    }


def report_lines(result: Mapping[str, Any], blocks: Sequence[str]) -> list[str]:
    """The report; `blocks` are the latencies to show, those without figures left out."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]

    def add(label: str, value: Any, form: str = "") -> None:
        if value is not None:
            lines.append(f"{label + ':':<40} {value:<10{form}}".rstrip())

    add("Successful requests", result["completed"])
    add("Failed requests", result["failed"])
    for failure, n in sorted(result["failures"].items()):
        add(f"  {failure}", n)
    add("Maximum request concurrency", result.get("max_concurrency"))
    if result.get("request_rate", "inf") != "inf":
        add("Request rate configured (RPS)", result["request_rate"], ".2f")
    add("Benchmark duration (s)", result["duration"], ".2f")
    add("Total input tokens", result["total_input_tokens"])
    add("Total generated tokens", result["total_output_tokens"])
    add("Request throughput (req/s)", result["request_throughput"], ".2f")
    add("Request goodput (req/s)", result["request_goodput"], ".2f")
    add("Output token throughput (tok/s)", result["output_throughput"], ".2f")
    add("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"], ".2f")
    add("Peak concurrent requests", float(result["max_concurrent_requests"]), ".2f")
    add("RTFx (Inverse Real-Time Factor)", result["rtfx"], ".2f")
    add("Total token throughput (tok/s)", result["total_token_throughput"], ".2f")
    add("Word error rate (%)", result.get("wer"), ".2f")
    add("Client ceiling (req/s)", result.get("client_ceiling"), ".2f")
    add("Client CPU (cores)", result.get("client_cpu_cores"), ".2f")
    for key in blocks:
        short, heading = NAMES[key]
        if result[f"mean_{key}_ms"] is None:
            continue
        lines.append(heading.center(WIDTH, "-"))
        kinds = [f"mean_{key}_ms", f"median_{key}_ms"]
        kinds += [k for k in result if k.startswith("p") and k.endswith(f"_{key}_ms")]
        for kind in kinds:
            add(f"{kind.partition('_')[0].capitalize()} {short} (ms)", result[kind], ".2f")
    lines.append("=" * WIDTH)
    return lines


def _statistics(
    key: str, seconds: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | None]:
    names = {f"p{p:g}_{key}_ms": p for p in percentiles}
    if not seconds:
        return dict.fromkeys((f"mean_{key}_ms", f"median_{key}_ms", f"std_{key}_ms", *names))
    ms = 1000 * np.asarray(seconds)
    figures: dict[str, float | None] = {
        f"mean_{key}_ms": float(ms.mean()),
        f"median_{key}_ms": float(np.median(ms)),
        f"std_{key}_ms": float(ms.std()),
    }
    return figures | {name: float(np.percentile(ms, p)) for name, p in names.items()}


def _busiest_second(outcomes: Sequence[Outcome]) -> float:
    """The most pieces of text in any whole second since the first request."""
    if not outcomes:
        return 0.0
    first = min(outcome.start for outcome in outcomes)
    times: list[float] = []
    for outcome in outcomes:
        if outcome.ttft is not None:
            times += (outcome.start - first + np.cumsum([outcome.ttft, *outcome.itls])).tolist()
    return float(np.bincount(np.asarray(times, np.int64)).max()) if times else 0.0


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    """The most requests in flight at any time; one that ends as another starts is not counted."""
    events = sorted(
        [(outcome.start, 1) for outcome in outcomes]
        + [(outcome.start + outcome.latency, -1) for outcome in outcomes]
    )
    return int(max(np.cumsum([step for _, step in events]), default=0))
