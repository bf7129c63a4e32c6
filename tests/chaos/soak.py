"""Hours of bounded load with random faults from a seed; an interrupted run goes on by its file."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.campaign import run_fault
from tests.chaos.faults import random_fault
from tests.chaos.kept_load import steady_load
from tests.chaos.live_load import LiveLoad, live_texts
from tests.chaos.load import verdicts
from tests.chaos.report import Outcome
from tests.chaos.target import local_target

WARM_SAMPLES = 3  # of a cluster's start, before its caches are full
MIN_SAMPLES = 8  # for a line through them
MAX_GROWTH = 0.10  # of the memory, in an hour
BEFORE_S, WATCH_S = 20.0, 15.0
LIVE_RATE = 0.33  # sessions/s; they take 7 s, and every fourth 27 s: four at once
SAMPLE_S, END_S = 30.0, 180.0  # of live sessions


@dataclass
class Soak:
    """samples: of the idle, whole cluster after each fault: seconds since its start, its number,
    resident bytes and open files of all its processes, by kind.
    """

    seed: int
    rate: float
    seconds: float = 0.0
    n_starts: int = 0
    n_faults: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    bad: list[dict[str, Any]] = field(default_factory=list)
    slowest_recovery_s: float = 0.0
    never_recovered: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def resumed(cls, state: Path, seed: int, rate: float) -> Soak:
        if state.exists():
            kept = cls(**json.loads(state.read_text()))
            if (kept.seed, kept.rate) == (seed, rate):
                return kept
        return cls(seed, rate)

    def save(self, state: Path) -> None:
        new = state.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(state)

    def count(self, outcome: Outcome) -> None:
        self.n_faults += 1
        totals = Counter(self.totals)
        for name in ("sent", "right", "retried", "met_refusal", "refused", "wrong", "lost"):
            totals[name] += getattr(outcome, name)
        self.totals = dict(totals)
        if not outcome.is_good:
            self.bad.append(asdict(outcome))
        if outcome.recovery_s is None:
            self.never_recovered.append(outcome.fault)
        else:
            self.slowest_recovery_s = max(self.slowest_recovery_s, outcome.recovery_s)

    def growth(self, what: str = "memory") -> float | None:
        """Of `what` of all processes, as a share of it in an hour; None: too few samples."""
        starts = [
            [one for one in self.samples if one["start"] == start][WARM_SAMPLES:]
            for start in range(1, self.n_starts + 1)
        ]
        return slope_per_hour(starts, what)

    def line(self) -> str:
        growths = {what: self.growth(what) for what in ("memory", "files")}
        grown = ", ".join(
            f"{what} {'?' if share is None else f'{share:+.1%} an hour'}"
            for what, share in growths.items()
        )
        return (
            f"{self.seconds / 60:.0f} min, {self.n_faults} faults, {self.n_starts} starts: "
            f"{self.totals}; slowest recovery {self.slowest_recovery_s:.1f} s, never "
            f"{self.never_recovered}; {grown}; {len(self.bad)} bad"
        )


def slope_per_hour(starts: Sequence[Sequence[Mapping[str, Any]]], what: str) -> float | None:
    """Growth in an hour, as a share of the mean: one slope for all starts, each with its level.

    what: "memory", or "files".
    """
    times: list[float] = []
    values: list[float] = []
    levels: list[float] = []
    for samples in starts:
        if len(samples) > 1:
            at = np.array([one["at_s"] for one in samples])
            value = np.array([sum(one[what].values()) for one in samples], float)
            times += list(at - at.mean())
            values += list(value - value.mean())
            levels += list(value)
    if len(times) < MIN_SAMPLES:
        return None
    return float(3600 * np.dot(times, values) / np.dot(times, times) / np.mean(levels))


def soak(asked_s: float, state: Path, *, seed: int, rate: float) -> Soak:
    """Go on until the soak has lasted `asked_s` in all, or something bad happened."""
    run = Soak.resumed(state, seed, rate)
    if run.seconds >= asked_s or run.bad:
        return run
    run.n_starts += 1
    with local_target() as target, steady_load(target.url, rate) as load:
        began_s = last_s = time.monotonic()
        while run.seconds < asked_s and not run.bad:
            fault = random_fault(seed, run.n_faults)
            if reason := fault.possible(target):
                print(f"not run: {fault.name}: {reason}")
                run.n_faults += 1
                continue
            outcome = run_fault(fault, target, load, before_s=BEFORE_S, watch_s=WATCH_S)
            run.count(outcome)
            now_s = time.monotonic()
            run.seconds += now_s - last_s
            last_s = now_s
            run.samples.append(
                {
                    "start": run.n_starts,
                    "at_s": now_s - began_s,
                    "memory": target.memory_bytes(),
                    "files": target.files(),
                }
            )
            load.sent.clear()  # all have ended; a soak of days must not keep them
            run.save(state)
            print(f"{fault.name}: {run.line()}")
    return run


def live_soak(seconds: float) -> dict[str, Any]:
    """Live sessions, one after another, without faults; the slopes leave out the first quarter."""
    samples: list[dict[str, Any]] = []
    with local_target() as target:
        with LiveLoad(target.url, live_texts(target.url), LIVE_RATE) as load:
            began_s = time.monotonic()
            for due_s in np.arange(SAMPLE_S, seconds + 1, SAMPLE_S):
                time.sleep(max(0.0, began_s + due_s - time.monotonic()))
                memory, files = target.memory_bytes(), target.files()
                samples.append({"at_s": due_s, "memory": memory, "files": files})
                print(f"{due_s / 60:.1f} min: {dict(verdicts(tuple(load.sent)))}", flush=True)
            load.pause()
            load.wait_for_answers(END_S)
        left_over = target.left_over()
    warm = [samples[len(samples) // 4 :]]
    return {
        "benchmark": "live_soak",
        "seconds": seconds,
        "sessions": dict(verdicts(load.sent)),
        "bad": [one.detail for one in load.sent if one.verdict != "right"][:20],
        "memory_per_hour": slope_per_hour(warm, "memory"),
        "files_per_hour": slope_per_hour(warm, "files"),
        "left_over": left_over,
    }
