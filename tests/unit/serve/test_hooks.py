"""Serve's hooks do what Serve's interface wants of them, whatever comes."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.serve.config import AutoscalingPolicy, RequestRouterConfig

from cluster.messages import EncodeRequest, WorkerLoad
from cluster.serve import worker_choice
from cluster.serve.app import STATS_PERIOD_S, replica_choice
from cluster.serve.hooks import ledger as process
from cluster.serve.hooks import scaling_state
from cluster.serve.hooks.autoscaling import PoolPolicy
from cluster.serve.hooks.replica_choice import LoadAwareRouter
from cluster.serve.worker_choice import WorkLedger, key_of
from cluster.settings import ScalingSettings


def make_replica(name: str, stats: dict[str, Any], metadata: Any = None) -> Any:
    return SimpleNamespace(
        replica_id=name, routing_stats=stats, replica_metadata=metadata or {}, node_id=None
    )


def make_pending(*args: Any) -> Any:
    return SimpleNamespace(args=args, routing_context=SimpleNamespace(should_backoff=False))


def make_router(ledger: WorkLedger | None = None) -> LoadAwareRouter:
    """Without what Serve gives it, which choosing does not use."""
    router = LoadAwareRouter.__new__(LoadAwareRouter)
    router.initialize_state(ledger=ledger or WorkLedger(), chance=random.Random(0))
    return router


def request(window: int) -> EncodeRequest:
    return EncodeRequest("hooks", window, 1, np.zeros(16, np.int16), 30.0)


async def test_windows_that_come_together_are_spread() -> None:
    """Serve gives all calls of one HTTP request the same id: each is counted all the same."""
    ledger = WorkLedger()
    router = make_router(ledger)
    names = [f"spread-{index}" for index in range(3)]
    replicas = [make_replica(name, WorkerLoad(window_s=0.1).as_stats()) for name in names]
    firsts = []
    for window in range(6):
        ledger.begin(key_of(request(window)))
        pending = make_pending(request(window))
        order = await router.choose_replicas(replicas, pending)
        assert pending.routing_context.should_backoff
        assert sorted(one.replica_id for rank in order for one in rank) == names
        firsts.append(order[0][0].replica_id)
    assert sorted(firsts) == sorted(names * 2)
    for window in range(6):
        ledger.end(key_of(request(window)))
    assert [ledger.work(name) for name in names] == [0.0, 0.0, 0.0]


async def test_a_full_pool_costs_few_questions() -> None:
    """Serve asks every replica of the answer that it takes for full, one after another."""
    replicas = [make_replica(f"many-{index}", {}) for index in range(50)]
    order = await make_router().choose_replicas(replicas, make_pending(request(0)))
    assert [len(rank) for rank in order] == [1, 1, 1]


async def test_the_same_audio_in_flight_goes_to_one_encoder_and_counts_once() -> None:
    ledger = WorkLedger()
    router = make_router(ledger)
    replicas = [make_replica(f"same-{index}", {}) for index in range(3)]
    firsts = []
    for window in range(4):
        same = replace(request(window), audio_key=b"k")
        ledger.begin(key_of(same))
        order = await router.choose_replicas(replicas, make_pending(same))
        firsts.append(order[0][0].replica_id)
    assert len(set(firsts)) == 1
    assert ledger.work(firsts[0]) == 1.0
    order = await router.choose_replicas(
        [one for one in replicas if one.replica_id != firsts[0]], make_pending(same)
    )
    assert order[0][0].replica_id != firsts[0], "that one is gone"


async def test_a_failed_encoder_gets_no_window_of_audio_that_was_sent_there() -> None:
    ledger = WorkLedger()
    router = make_router(ledger)
    replicas = [make_replica(f"failed-{index}", {}) for index in range(2)]
    same = [replace(request(window), audio_key=b"k") for window in range(2)]
    firsts = []
    for window in same:
        ledger.begin(key_of(window))
        order = await router.choose_replicas(replicas, make_pending(window))
        firsts.append(order[0][0].replica_id)
        failed = WorkerLoad(failed=True).as_stats()
        replicas = [
            make_replica(one.replica_id, failed if one.replica_id == firsts[0] else {})
            for one in replicas
        ]
    assert firsts[0] != firsts[1]


async def test_a_window_counts_where_it_went() -> None:
    ledger = WorkLedger()
    ledger.begin(key_of(request(0)))
    router, pending = make_router(ledger), make_pending(request(0))
    replicas = [make_replica(name, {}) for name in ("went-a", "went-b")]
    order = await router.choose_replicas(replicas, pending)
    full, other = (rank[0].replica_id for rank in order)
    router.on_request_routed(pending, other, None)
    assert (ledger.work(full), ledger.work(other)) == (0.0, 1.0)


@pytest.mark.parametrize("stats", [{"work": "much"}, {"window_s": None}])
async def test_nonsense_from_a_worker_hangs_nothing(stats: dict[str, Any]) -> None:
    replicas = [make_replica("sane", {}), make_replica("mad", stats)]
    order = await make_router().choose_replicas(replicas, make_pending(request(0)))
    assert sorted(rank[0].replica_id for rank in order) == ["mad", "sane"]


async def test_calls_that_are_no_windows_go_anywhere() -> None:
    for pending in (None, make_pending(), make_pending("status")):
        order = await make_router().choose_replicas([make_replica("only", {})], pending)
        assert [[one.replica_id for one in rank] for rank in order] == [["only"]]


def test_hooks_sent_by_value_share_what_lives_in_the_process() -> None:
    """A ledger or balancer sent along with them would be a copy that nobody else sees."""
    config: Any = RequestRouterConfig
    choice = config(request_router_class="cluster.serve.hooks.replica_choice.LoadAwareRouter")
    received = choice.get_request_router_class()
    assert received.choose_replicas.__globals__["ranked"] is worker_choice.ranked
    assert received.initialize_state.__globals__["process"] is process
    sent = AutoscalingPolicy(policy_function="cluster.serve.hooks.autoscaling:PoolPolicy")  # type: ignore[no-untyped-call]
    assert sent.get_policy().__call__.__globals__["scaling_state"] is scaling_state
    assert scaling_state.of("a", "m") is scaling_state.of("a", "m")
    assert scaling_state.of("a", "m") is not scaling_state.of("a", "n")


def test_workers_are_asked_often_enough() -> None:
    assert replica_choice()["request_router_config"].request_routing_stats_period_s <= 0.5
    assert STATS_PERIOD_S <= 0.5


def make_context(**told: Any) -> Any:
    usual = {
        "app_name": "hooks",
        "deployment_name": "encoder",
        "target_num_replicas": 2,
        "running_replicas": ["a", "b"],
        "total_num_requests": 0.0,
        "total_queued_requests": 0.0,
        "aggregated_metrics": {},
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 5,
        "current_time": 0.0,
    }
    return SimpleNamespace(**usual | told)


def make_policy(**rules: Any) -> PoolPolicy:
    settings = ScalingSettings(**{"upscale_delay_s": 0.0} | rules)
    return PoolPolicy("encoder", "hooks", settings.model_dump())


def test_a_policy_reads_what_workers_tell() -> None:
    told = {
        "busy": {"a": 1.0, "b": 1.0},
        "queue_s": {"a": 8.0, "b": 7.0},
        "slack_s": {"a": 100.0, "b": 100.0},
        "unread": {"a": 0.0, "b": 0.0},
    }
    workers, _ = make_policy()(make_context(aggregated_metrics=told))
    assert workers == 5  # two work all the time, and 15 s of work are to be done in 5 s


def test_a_policy_that_fails_leaves_things_as_they_are() -> None:
    context = make_context(aggregated_metrics={"busy": {"a": "very"}})
    assert make_policy()(context) == (2, {})
