"""Pools grow within seconds, do not flap, keep balance, sleep and wake.

On a model of the cluster, and on a replay of a real one (`tests/data/scaling_trace.json`).
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.serve.replica_count import (
    Balancer,
    DecoderSignals,
    EncoderSignals,
    PoolView,
    Role,
    ScalingRules,
)

TRACE = Path(__file__).parents[2] / "data" / "scaling_trace.json"
BOTH: tuple[Role, Role] = ("encoder", "decoder")
STEP_S = 0.1
WINDOW_S = 0.1  # encoder seconds for a window
ROWS = 16  # of a decoder
BUSY_STEPS = 50  # over which a worker tells its busy share
EXPORT_WINDOWS = 16  # published and not yet read, of one encoder


@dataclass
class Workers:
    start_s: float
    running: int
    starting: list[float] = field(default_factory=list)  # when each is ready

    @property
    def target(self) -> int:
        return self.running + len(self.starting)

    def resize(self, wanted: int, now_s: float) -> None:
        while self.target < wanted:
            self.starting.append(now_s + self.start_s)
        while self.target > wanted:
            if self.starting:
                self.starting.pop()
            else:
                self.running -= 1

    def tick(self, now_s: float) -> None:
        ready = [at_s for at_s in self.starting if at_s <= now_s]
        self.starting = [at_s for at_s in self.starting if at_s > now_s]
        self.running += len(ready)


@dataclass
class PoolModel:
    rules: dict[Role, ScalingRules]
    start_s: float  # of a worker
    decode_s: float  # that a window holds a row
    now_s: float = 0.0
    queue: float = 0.0  # windows that wait for an encoder
    unread: float = 0.0  # published, waiting for rows
    worked: deque[float] = field(default_factory=deque)  # encoder seconds in each of the last steps
    rows: deque[tuple[float, float]] = field(default_factory=deque)  # (until, windows)
    history: list[tuple[float, Role, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.balancer = Balancer()
        self.pools: dict[Role, Workers] = {
            role: Workers(self.start_s, rules.min_workers) for role, rules in self.rules.items()
        }

    @property
    def used(self) -> float:
        return sum(windows for _, windows in self.rows)

    def run(self, windows_per_step: Sequence[float]) -> None:
        for windows in windows_per_step:
            self.step(windows)

    def step(self, windows: float) -> None:
        self.now_s += STEP_S
        for workers in self.pools.values():
            workers.tick(self.now_s)
        while self.rows and self.rows[0][0] <= self.now_s:
            self.rows.popleft()
        self.queue += windows
        encoders, decoders = self.pools["encoder"].running, self.pools["decoder"].running
        room = encoders * EXPORT_WINDOWS - self.unread
        done = min(self.queue, encoders * STEP_S / WINDOW_S, max(0.0, room))
        self.queue -= done
        self.unread += done
        self.worked.append(done * WINDOW_S)
        if len(self.worked) > BUSY_STEPS:
            self.worked.popleft()
        read = min(self.unread, max(0.0, decoders * ROWS - self.used))
        self.unread -= read
        if read:
            self.rows.append((self.now_s + self.decode_s, read))
        self._decide()

    def _decide(self) -> None:
        for role in BOTH:
            view = self._encoder_view() if role == "encoder" else self._decoder_view()
            wanted = self.balancer.decide(role, self.rules[role], view, self.now_s).workers
            if wanted != view.target:
                self.history.append((round(self.now_s, 1), role, view.target, wanted))
                self.pools[role].resize(wanted, self.now_s)

    def _encoder_view(self) -> PoolView:
        workers = self.pools["encoder"]
        if not workers.running:
            return PoolView(workers.target, self.queue * WINDOW_S, len(workers.starting))
        n = workers.running
        busy = sum(self.worked) / (len(self.worked) * STEP_S * n)
        one = EncoderSignals(
            min(1.0, busy),
            self.queue * WINDOW_S / n,
            unread=self.unread / (n * EXPORT_WINDOWS),
        )
        return PoolView(workers.target, 0.0, len(workers.starting), encoders=(one,) * n)

    def _decoder_view(self) -> PoolView:
        workers = self.pools["decoder"]
        if not workers.running:
            return PoolView(workers.target, self.unread / ROWS, len(workers.starting))
        n = workers.running
        one = DecoderSignals(self.used / (n * ROWS), self.unread / (n * ROWS))
        return PoolView(workers.target, 0.0, len(workers.starting), decoders=(one,) * n)

    def changes(self, role: Role) -> list[tuple[float, int, int]]:
        return [(at, before, after) for at, who, before, after in self.history if who == role]

    def turns(self, role: Role) -> int:
        signs = [after > before for _, before, after in self.changes(role)]
        return sum(a != b for a, b in pairwise(signs))


def replay(rules: ScalingRules) -> tuple[float, list[tuple[float, Role, int, int]]]:
    trace: dict[str, Any] = json.loads(TRACE.read_text())
    balancer, targets = Balancer(), dict.fromkeys(BOTH, 1)
    changes: list[tuple[float, Role, int, int]] = []
    for at_s, role, queued, signals in trace["rows"]:
        if role == "encoder":
            encoders = tuple(EncoderSignals(*one) for one in signals)
            view = PoolView(targets[role], queued, encoders=encoders)
        else:
            decoders = tuple(DecoderSignals(*one) for one in signals)
            view = PoolView(targets[role], queued, decoders=decoders)
        decision = balancer.decide(role, rules, view, at_s)
        if decision.workers != targets[role]:
            changes.append((at_s, role, targets[role], decision.workers))
            targets[role] = decision.workers
    return float(trace["load_began_s"]), changes


def make_model(start_s: float = 2.0, decode_s: float = 1.0, **rules: Any) -> PoolModel:
    own = ScalingRules(**{"min_workers": 1, "max_workers": 8} | rules)
    return PoolModel(dict.fromkeys(BOTH, own), start_s, decode_s)


def poisson(per_s: float, seconds: float, seed: int = 0) -> list[float]:
    chance, steps = random.Random(seed), []
    for _ in range(round(seconds / STEP_S)):
        n, at = 0, chance.expovariate(per_s)
        while at < STEP_S:
            n, at = n + 1, at + chance.expovariate(per_s)
        steps.append(float(n))
    return steps


def test_a_step_of_load_is_answered_within_five_seconds() -> None:
    model = make_model()
    model.run(poisson(3, 60))
    assert model.history == []
    model.run(poisson(30, 5))
    n_needed = 30 * WINDOW_S / 0.8
    assert model.pools["encoder"].target >= n_needed
    assert model.pools["decoder"].target > 1
    model.run(poisson(30, 60))
    assert model.queue * WINDOW_S < 0.5
    assert model.unread < ROWS
    assert max(after for _, _, after in model.changes("encoder")) <= 2 * n_needed


def test_what_a_real_cluster_told_is_answered_in_time_and_without_flapping() -> None:
    began_s, changes = replay(ScalingRules(max_workers=3))
    for role in BOTH:
        own = [change for change in changes if change[1] == role]
        signs = [after > before for _, _, before, after in own]
        assert signs == sorted(signs, reverse=True), changes  # up, then down, once
        assert own[-1][3] == 1
    encoders = [change for change in changes if change[1] == "encoder"]
    assert 0 < encoders[0][0] - began_s <= 5.0, changes


def test_machines_that_come_late_are_not_ordered_twice() -> None:
    model = make_model(start_s=60.0, max_workers=50)
    model.run(poisson(3, 30) + poisson(30, 55))
    assert 30 * WINDOW_S / 0.8 <= model.pools["encoder"].target <= 2 * 30 * WINDOW_S / 0.8
    assert model.pools["decoder"].target <= 6


@pytest.mark.parametrize("quiet_s", [5, 30])
def test_bursts_do_not_make_it_flap(quiet_s: float) -> None:
    model = make_model()
    for seed in range(6):
        model.run(poisson(25, 5, seed) + poisson(2, quiet_s, seed))
    assert max(model.turns(role) for role in BOTH) <= 1, model.history


def test_one_window_more_or_less_changes_nothing() -> None:
    model = make_model()
    for seed in range(10):
        model.run(poisson(15, 10, seed) + poisson(17, 10, seed))
    assert max(model.turns(role) for role in BOTH) <= 1, model.history


def test_less_load_ends_workers_after_the_delay_and_not_before() -> None:
    model = make_model(downscale_delay_s=30.0)
    model.run(poisson(30, 30))
    grown = model.pools["encoder"].target
    quiet_s = model.now_s
    model.run(poisson(3, 25))
    assert model.pools["encoder"].target == grown
    model.run(poisson(3, 60))
    assert model.pools["encoder"].target == 1
    assert model.pools["decoder"].target == 1
    assert all(
        at > quiet_s + 25 for at, before, after in model.changes("encoder") if after < before
    )


def test_slow_decoders_grow_and_encoders_that_wait_for_them_do_not() -> None:
    model = make_model(decode_s=20.0, start_s=5.0)
    model.run(poisson(6, 60))
    assert model.pools["decoder"].target >= 6 * 20 / ROWS
    assert max([after for _, _, after in model.changes("encoder")], default=1) <= 2


def test_decoders_grow_with_encoders_before_they_are_full() -> None:
    balancer, rules = Balancer(), ScalingRules(max_workers=8, upscale_delay_s=0.0)
    full = EncoderSignals(busy=1.0, queue_s=20.0)
    decoders = PoolView(2, decoders=(DecoderSignals(0.6), DecoderSignals(0.6)))
    assert balancer.decide("decoder", rules, decoders, 0.0).workers == 2
    grown = balancer.decide("encoder", rules, PoolView(2, encoders=(full, full)), 0.1)
    assert grown.workers > 2
    answer = balancer.decide("decoder", rules, decoders, 0.2)
    assert answer.workers > 2
    assert answer.reason == "encoders grow"


def test_a_near_deadline_wants_more_than_a_far_one() -> None:
    def wanted(slack_s: float) -> int:
        rules = ScalingRules(max_workers=100, upscale_delay_s=0.0)
        view = PoolView(1, encoders=(EncoderSignals(1.0, 30.0, slack_s),))
        return Balancer().decide("encoder", rules, view, 0.0).workers

    assert wanted(120.0) == 1 + 30 / 5
    assert wanted(6.0) == 1 + 30 / 3


def test_pools_sleep_together_and_wake_together() -> None:
    model = make_model(min_workers=0, to_zero_delay_s=20.0)
    model.run([0.0] * 10)  # nothing came yet
    assert {role: model.pools[role].target for role in BOTH} == {"encoder": 0, "decoder": 0}
    model.run([1.0])
    model.run([0.0])
    assert {role: model.pools[role].target for role in BOTH} == {"encoder": 1, "decoder": 1}
    model.run([0.0] * 50)
    assert model.queue == model.unread == model.used == 0
    assert model.pools["encoder"].target == 1
    model.run([0.0] * 260)
    assert {role: model.pools[role].target for role in BOTH} == {"encoder": 0, "decoder": 0}


@pytest.mark.parametrize(("woken", "other"), [BOTH, BOTH[::-1]])
def test_what_serve_wakes_by_itself_wakes_the_other_pool(woken: Role, other: Role) -> None:
    """See `_get_cold_start_scale_up_replicas` in Serve's autoscaling_policy.py."""
    balancer = Balancer()
    rules = ScalingRules(min_workers=0, max_workers=8, to_zero_delay_s=5.0)
    for second in (0.0, 0.5):
        for role in BOTH:
            assert balancer.decide(role, rules, PoolView(0), second).workers == 0
    targets = [balancer.decide(other, rules, PoolView(0), 1.0 + i / 2).workers for i in range(3)]
    assert targets[1:] == [1, 1]
    for second in range(2, 600):
        assert balancer.decide(other, rules, PoolView(1), float(second)).workers == 1
    assert balancer.decide(woken, rules, PoolView(1), 600.0).workers == 1, "it has its first calls"


@pytest.mark.parametrize(("loading", "other"), [BOTH, BOTH[::-1]])
def test_a_pool_stays_awake_while_calls_wait_for_a_worker_of_the_other(
    loading: Role, other: Role
) -> None:
    """The other's target is 1 already, and Serve asks no more about it until the worker runs."""
    balancer, rules = Balancer(), ScalingRules(min_workers=0, max_workers=8, to_zero_delay_s=5.0)
    balancer.decide(loading, rules, PoolView(1, starting=1), 0.0)
    for second in range(1, 600):
        assert balancer.decide(other, rules, PoolView(1), float(second)).workers == 1


def test_a_pool_that_may_not_sleep_keeps_its_least() -> None:
    model = make_model(min_workers=2, to_zero_delay_s=1.0)
    model.run([0.0] * 1000)
    assert model.history == []


def test_one_pool_alone_is_scaled_too() -> None:
    balancer, rules = Balancer(), ScalingRules(max_workers=4, upscale_delay_s=0.0)
    view = PoolView(1, decoders=(DecoderSignals(1.0, 2.0),))
    assert balancer.decide("decoder", rules, view, 0.0).workers == 3


def test_new_rules_hold_at_once() -> None:
    balancer, view = Balancer(), PoolView(1, encoders=(EncoderSignals(1.0, 100.0),))
    for workers in (2, 5):
        rules = ScalingRules(max_workers=workers, upscale_delay_s=0.0)
        assert balancer.decide("encoder", rules, view, 0.0).workers == workers


@pytest.mark.parametrize("for_bulk", [False, True])
def test_bulk_work_makes_no_pool_grow_unless_it_is_asked_for(for_bulk: bool) -> None:
    rules = ScalingRules(max_workers=8, upscale_delay_s=0.0, for_bulk=for_bulk)
    balancer = Balancer()
    encoder = EncoderSignals(bulk_busy=1.0, bulk_queue_s=12.0)
    decoder = DecoderSignals(bulk_used=1.0, bulk_waiting=3.0)
    views: dict[Role, PoolView] = {
        "encoder": PoolView(1, encoders=(encoder,)),
        "decoder": PoolView(1, decoders=(decoder,)),
    }
    for role in BOTH:
        assert (balancer.decide(role, rules, views[role], 0.0).workers > 1) == for_bulk


def test_bulk_work_keeps_pools_awake() -> None:
    rules = ScalingRules(min_workers=0, max_workers=8, to_zero_delay_s=5.0, downscale_delay_s=5.0)
    balancer = Balancer()
    busy = PoolView(1, encoders=(EncoderSignals(bulk_busy=0.5),))
    idle = PoolView(1, decoders=(DecoderSignals(),))
    for second in range(60):
        assert balancer.decide("encoder", rules, busy, float(second)).workers == 1
        assert balancer.decide("decoder", rules, idle, float(second)).workers == 1


def test_a_pool_that_is_no_longer_scaled_asks_for_nothing_more() -> None:
    """Its encoders waited for decoders when a deploy gave them a fixed number."""
    balancer, rules = Balancer(), ScalingRules(max_workers=4, downscale_delay_s=30.0)
    starved = (EncoderSignals(busy=1.0, queue_s=5.0, unread=0.9),)
    balancer.decide("encoder", rules, PoolView(1, encoders=starved), 0.0)
    idle, found = (DecoderSignals(), DecoderSignals()), 2
    for second in range(200):
        view = PoolView(found, decoders=idle[:found])
        found = balancer.decide("decoder", rules, view, float(second)).workers
    assert found == 1
