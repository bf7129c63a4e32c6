"""Hours of bounded load with random faults from a seed, and of live sessions without faults."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tests.chaos.campaign import Outcome, run_fault
from tests.chaos.faults import random_fault
from tests.chaos.live_load import LiveLoad, live_texts
from tests.chaos.load import steady_load, verdicts
from tests.chaos.target import Target, local_target

WARM_SAMPLES = 3  # of a cluster's start, before its caches are full
MIN_SAMPLES = 8  # for a line through them
MAX_GROWTH = 0.10  # of the memory, in an hour
BEFORE_S, WATCH_S = 20.0, 15.0
LIVE_RATE = 0.33  # sessions/s; they take 7 s, and every fourth 27 s: four at once
SAMPLE_S, END_S = 30.0, 180.0  # of live sessions
COUNTED = ("sent", "right", "retried", "met_refusal", "refused", "wrong", "lost")

Sample = dict[str, Any]  # seconds; resident bytes and open files of all processes, by kind


def sample(target: Target, at_s: float) -> Sample:
    return {"at_s": at_s, "memory": target.memory_bytes(), "files": target.files()}


def growth_per_hour(samples: Sequence[Mapping[str, Any]], what: str) -> float | None:
    """Of "memory" or "files", as a share of the mean; None: too few samples."""
    if len(samples) < MIN_SAMPLES:
        return None
    values = np.array([sum(one[what].values()) for one in samples], float)
    slope, _ = np.polyfit([one["at_s"] for one in samples], values, 1)
    return float(3600 * slope / values.mean())


@dataclass
class Soak:
    n_faults: int = 0
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    bad: list[dict[str, Any]] = field(default_factory=list)
    slowest_recovery_s: float = 0.0
    never_recovered: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        for name in COUNTED:
            self.totals[name] += getattr(outcome, name)
        if not outcome.is_good:
            self.bad.append(asdict(outcome))
        if outcome.recovery_s is None:
            self.never_recovered.append(outcome.fault)
        else:
            self.slowest_recovery_s = max(self.slowest_recovery_s, outcome.recovery_s)

    def growth(self, what: str = "memory") -> float | None:
        return growth_per_hour(self.samples[WARM_SAMPLES:], what)

    def line(self) -> str:
        growths = {what: self.growth(what) for what in ("memory", "files")}
        grown = ", ".join(
            f"{what} {'?' if share is None else f'{share:+.1%} an hour'}"
            for what, share in growths.items()
        )
        return (
            f"{self.n_faults} faults: {self.totals}; slowest recovery "
            f"{self.slowest_recovery_s:.1f} s, never {self.never_recovered}; {grown}; "
            f"{len(self.bad)} bad"
        )


def soak(seconds: float, *, seed: int, rate: float) -> Soak:
    run = Soak()
    with local_target() as target, steady_load(target.url, rate) as load:
        began_s = time.monotonic()
        while time.monotonic() < began_s + seconds and not run.bad:
            fault = random_fault(seed, run.n_faults)
            run.n_faults += 1
            if reason := fault.possible(target):
                print(f"not run: {fault.name}: {reason}")
                continue
            run.count(run_fault(fault, target, load, before_s=BEFORE_S, watch_s=WATCH_S))
            run.samples.append(sample(target, time.monotonic() - began_s))
            load.sent.clear()  # all have ended; a soak of days must not keep them
            print(f"{fault.name}: {run.line()}")
    return run


def live_soak(seconds: float) -> dict[str, Any]:
    samples: list[Sample] = []
    with local_target() as target:
        with LiveLoad(target.url, live_texts(target.url), LIVE_RATE) as load:
            began_s = time.monotonic()
            for due_s in np.arange(SAMPLE_S, seconds + 1, SAMPLE_S).tolist():
                time.sleep(max(0.0, began_s + due_s - time.monotonic()))
                samples.append(sample(target, due_s))
                print(f"{due_s / 60:.1f} min: {dict(verdicts(tuple(load.sent)))}", flush=True)
            load.pause()
            load.wait_for_answers(END_S)
        left_over = target.left_over()
    warm = samples[len(samples) // 4 :]
    return {
        "benchmark": "live_soak",
        "seconds": seconds,
        "sessions": dict(verdicts(load.sent)),
        "bad": [one.detail for one in load.sent if one.verdict != "right"][:20],
        "memory_per_hour": growth_per_hour(warm, "memory"),
        "files_per_hour": growth_per_hour(warm, "files"),
        "left_over": left_over,
    }
