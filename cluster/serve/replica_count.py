"""Decide how many workers each pool of a model should have; encoders and decoders are balanced.

Demand of encoders is their work, their queue's growth, and a queue that would take longer than
`target_wait_s` or a deadline allows. Demand of decoders is their used pages and rows, plus waiting
sequences. A pool grows to the least number wanted during `upscale_delay_s`, and shrinks to the most
wanted during `downscale_delay_s`. The state shared by the pickled hooks lies here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from cluster.common.messages import Role
from cluster.common.metrics import CONTROLLER_METRICS, Recorder, ray_recorder
from cluster.common.settings import ScalingSettings
from cluster.common.signals import NO_SLACK_S, DecoderSignals, EncoderSignals

FULL = 0.8  # demand for each worker above which workers are added
EMPTY = 0.6  # a worker is removed only if the demand for each of the others stays below this
GROWTH_S = 2.0  # interval over which a queue's growth is measured
WAITING = 0.5  # demand of a waiting sequence, which starts as soon as another one ends
LEAST_WAIT_S = 0.25
GONE_S = 60.0  # after so long without a decision a pool is taken as no longer scaled
LONGEST_START_S = 1800.0  # the same for a pool without a running worker: its first may still load


class ScalingRules(ScalingSettings):
    """min_workers: 0 lets the pool sleep after `to_zero_delay_s` without requests."""

    min_workers: int = 1
    max_workers: int = 1


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool at one moment. target: workers, including the `starting` ones.

    queued: calls that no worker has taken, in encoder seconds or shares of a decoder's capacity.
    """

    target: int
    queued: float = 0.0
    starting: int = 0
    encoders: tuple[EncoderSignals, ...] = ()
    decoders: tuple[DecoderSignals, ...] = ()

    def with_bulk(self) -> PoolView:
        encoders = tuple(one.with_bulk() for one in self.encoders)
        return replace(
            self, encoders=encoders, decoders=tuple(o.with_bulk() for o in self.decoders)
        )


@dataclass(frozen=True, slots=True)
class Decision:
    workers: int
    reason: str


@dataclass(slots=True)
class _Pool:
    rules: ScalingRules
    view: PoolView = field(default_factory=lambda: PoolView(0))
    wanted: deque[tuple[float, int, str]] = field(default_factory=deque)  # time, workers, reason
    queue: deque[tuple[float, float]] = field(default_factory=deque)  # time, encoder seconds
    active_s: float = 0.0  # time of its last work
    asked_s: float = 0.0
    n_passed_by: int = 0  # decisions for the other pool since the last one for this

    @property
    def has_none_running(self) -> bool:
        return self.view.target == self.view.starting

    def is_gone(self, now_s: float) -> bool:
        return now_s - self.asked_s > (LONGEST_START_S if self.has_none_running else GONE_S)


class Balancer:
    def __init__(self) -> None:
        self._pools: dict[Role, _Pool] = {}

    def decide(self, role: Role, rules: ScalingRules, view: PoolView, now_s: float) -> Decision:
        for gone in [one for one, it in self._pools.items() if it.is_gone(now_s)]:
            del self._pools[gone]
        pool = self._pools.get(role)
        if pool is None or pool.rules != rules:
            pool = self._pools[role] = _Pool(rules)
            pool.active_s = now_s if view.target else -math.inf  # a pool that sleeps stays asleep
        pool.asked_s = now_s
        self._note_wake(pool, now_s)
        if _is_active(everything := view.with_bulk()):
            pool.active_s = now_s
        pool.view = everything if rules.for_bulk else view  # else bulk work only keeps it awake
        _note_queue(pool, now_s)
        workers, reason = self._wanted(role, now_s)
        pool.wanted.append((now_s, workers, reason))
        longest_s = max(rules.downscale_delay_s, rules.upscale_delay_s)
        while len(pool.wanted) > 1 and now_s - pool.wanted[1][0] >= longest_s:
            pool.wanted.popleft()
        return self._settled(pool, now_s)

    def _note_wake(self, asked: _Pool, now_s: float) -> None:
        """Keep the asked pool awake while calls wait for the first worker of the other one.

        Serve starts that worker itself and does not ask about its pool until the worker runs.
        """
        asked.n_passed_by = 0
        for other in self._pools.values():
            if other is not asked:
                other.n_passed_by += 1
                if other.has_none_running and other.n_passed_by > 1:
                    asked.active_s = other.active_s = now_s

    def _settled(self, pool: _Pool, now_s: float) -> Decision:
        rules, target = pool.rules, pool.view.target
        _, workers, reason = pool.wanted[-1]
        known_s = now_s - pool.wanted[0][0]
        if target == 0 or workers == 0:  # waking needs no delay, `_sleeps` has its own
            return Decision(workers, reason)
        least = min(_since(pool.wanted, now_s - rules.upscale_delay_s))
        if least > target and known_s >= rules.upscale_delay_s:
            return Decision(least, reason)
        most = max(_since(pool.wanted, now_s - rules.downscale_delay_s))
        if most < target and known_s >= rules.downscale_delay_s:
            return Decision(most, reason)
        return Decision(target, "steady")

    def _wanted(self, role: Role, now_s: float) -> tuple[int, str]:
        pool = self._pools[role]
        rules, target = pool.rules, pool.view.target
        if self._sleeps(role, now_s):
            return 0, "idle"
        workers, reason = self._encoders() if role == "encoder" else self._decoders()
        if workers < target:
            reason = "less demand"
        if target == 0:
            workers, reason = max(1, workers), "awake"
        most = max(rules.min_workers, rules.max_workers)
        return min(max(workers, rules.min_workers, 1), most), reason

    def _encoders(self) -> tuple[int, str]:
        pool = self._pools["encoder"]
        view, busy = pool.view, sum(one.busy for one in pool.view.encoders)
        if any(one.is_starved for one in view.encoders):
            return _workers(busy, view.target), "busy"  # more would wait for decoders too
        # An encoder with a second of queued work is busy for the next second.
        rate = sum(min(1.0, one.busy + one.queue_s) for one in view.encoders)
        rate += _growth(pool.queue)
        slack_s = min((one.slack_s for one in view.encoders), default=NO_SLACK_S)
        wait_s = max(LEAST_WAIT_S, slack_s / 2)
        if not view.starting:  # while workers start, the queue alone adds no more
            wait_s = min(pool.rules.target_wait_s, wait_s)
        usual, hurried = _workers(rate, view.target), math.ceil(rate + _queue_s(view) / wait_s)
        return (hurried, "queue") if hurried > max(usual, view.target) else (usual, "busy")

    def _decoders(self) -> tuple[int, str]:
        view = self._pools["decoder"].view
        waiting = sum(one.waiting for one in view.decoders) + view.queued
        if view.starting:
            waiting = min(waiting, max(1, view.target - view.starting))
        demand = sum(one.used for one in view.decoders) + WAITING * waiting
        workers, reason = _workers(demand, view.target), "sequences wait" if waiting else "pages"
        encoders = self._pools.get("encoder")
        if encoders is None:
            return workers, reason
        if any(one.is_starved for one in encoders.view.encoders):
            workers, reason = max(workers, _workers(demand + 1, view.target)), "encoders wait"
        grown = _workers(demand * self._encoders_growth(), view.target)
        return (grown, "encoders grow") if grown > workers else (workers, reason)

    def _encoders_growth(self) -> float:
        encoders = self._pools.get("encoder")
        if encoders is None or not encoders.wanted or not encoders.view.target:
            return 1.0
        settled = self._settled(encoders, encoders.wanted[-1][0])
        return max(1.0, settled.workers / encoders.view.target)

    def _sleeps(self, role: Role, now_s: float) -> bool:
        if self._pools[role].rules.min_workers > 0:
            return False
        return all(
            now_s - pool.active_s >= self._pools[role].rules.to_zero_delay_s
            for pool in self._pools.values()
        )


def _is_active(view: PoolView) -> bool:
    working = sum(one.busy for one in view.encoders) + sum(one.used for one in view.decoders)
    waiting = _queue_s(view) + sum(one.waiting for one in view.decoders)
    return working + waiting > 0


def _queue_s(view: PoolView) -> float:
    return sum(one.queue_s for one in view.encoders) + view.queued


def _note_queue(pool: _Pool, now_s: float) -> None:
    pool.queue.append((now_s, _queue_s(pool.view)))
    while len(pool.queue) > 2 and now_s - pool.queue[1][0] >= GROWTH_S:
        pool.queue.popleft()


def _growth(queue: deque[tuple[float, float]]) -> float:
    (since_s, before), (now_s, now) = queue[0], queue[-1]
    return max(0.0, now - before) / max(now_s - since_s, GROWTH_S)


def _workers(demand: float, target: int) -> int:
    """Return `target` unless the workers would be above `FULL` or could be fewer below `EMPTY`."""
    if (needed := math.ceil(demand / FULL - 1e-9)) > target:
        return needed
    return min(target, math.ceil(demand / EMPTY - 1e-9))


def _since(wanted: Iterable[tuple[float, int, str]], from_s: float) -> list[int]:
    return [workers for at_s, workers, _ in wanted if at_s >= from_s]


@cache
def balancer_of(application: str, model: str) -> Balancer:
    return Balancer()


@cache
def _recorder() -> Recorder:
    return ray_recorder(CONTROLLER_METRICS)


def record(pool: str, model: str, before: int, decision: Decision) -> None:
    recorder = _recorder()
    recorder.set("splitscribe_autoscaling_target_workers", decision.workers, pool=pool, model=model)
    if decision.workers != before:
        recorder.add(
            "splitscribe_autoscaling_decisions_total",
            pool=pool,
            model=model,
            direction="up" if decision.workers > before else "down",
            reason=decision.reason,
        )
