"""Serve's hooks do what Serve's interface wants of them, whatever comes."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.config import AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter

from cluster.messages import EncodeRequest, WorkerLoad
from cluster.serve import worker_choice
from cluster.serve.app import (
    PACED_WORKERS,
    STATS_PERIOD_S,
    TOLD_WORKERS,
    pace,
    replica_choice,
)
from cluster.serve.hooks import ledger as process
from cluster.serve.hooks import load_sample, scaling_state
from cluster.serve.hooks import replica_choice as replica_choice_hook
from cluster.serve.hooks.autoscaling import PoolPolicy
from cluster.serve.hooks.replica_choice import LoadAwareRouter
from cluster.serve.worker_choice import WorkLedger, key_of, shared_key
from cluster.settings import ScalingSettings

DEPLOYMENT = DeploymentID("encoder", "hooks")


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


class AnsweringReplica:
    """As Serve's `RunningReplica`, for a worker that says its load when it is asked."""

    max_ongoing_requests = 64
    routing_stats: dict[str, Any] = {}  # noqa: RUF012
    replica_metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, name: str, load: WorkerLoad, silent_s: float = 0.0) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.node_id = f"node-{name}"
        self.load, self.silent_s, self.asked = load, silent_s, 0
        self._actor_handle = SimpleNamespace(record_routing_stats=SimpleNamespace(remote=self.tell))

    async def tell(self) -> dict[str, float]:
        self.asked += 1
        if self.silent_s:
            await asyncio.sleep(self.silent_s)
            raise RuntimeError("gone")
        return self.load.as_stats()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def make_asking_router(replicas: list[AnsweringReplica], ledger: WorkLedger) -> LoadAwareRouter:
    """Serve's own, whole, of a pool whose loads are not told."""
    router = LoadAwareRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, None, None, True)
    router.initialize_state(ledger=ledger, chance=random.Random(0), asks=True)
    router.update_replicas(replicas)  # type: ignore[arg-type]
    return router


async def assigned(router: LoadAwareRouter, request: EncodeRequest) -> Any:
    """The replica that Serve's router gives to a call of this."""
    metadata = RequestMetadata("http", "internal")  # the same for all calls of one HTTP request
    pending = PendingRequest(args=[request], kwargs={}, metadata=metadata)
    replica = await router._choose_replica_for_request(pending)
    router.on_request_routed(pending, replica.replica_id, None)  # type: ignore[arg-type]
    return replica


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are waited for and kept, however busy the machine is that runs the test."""
    monkeypatch.setattr(replica_choice_hook, "ANSWER_S", 30.0)
    monkeypatch.setattr(load_sample, "FRESH_S", 60.0)


@pytest.mark.usefixtures("patient")
async def test_a_large_pool_s_workers_are_asked_and_the_emptiest_gets_the_window() -> None:
    ledger = WorkLedger()
    replicas = [AnsweringReplica(f"w{n}", WorkerLoad(5.0, window_s=0.1)) for n in range(40)]
    router = make_asking_router(replicas, ledger)
    for window in range(30):
        ledger.begin(key_of(request(window)))
        before = {one.replica_id: ledger.work(one.replica_id) for one in replicas}
        asked = sum(one.asked for one in replicas)
        chosen = await assigned(router, request(window))
        assert sum(one.asked for one in replicas) - asked <= 2
        assert ledger.work(chosen.replica_id) == max(5.0, before[chosen.replica_id]) + 1.0
    sent = [ledger.own(one.replica_id) for one in replicas]
    assert sum(sent) == 30
    assert max(sent) <= 3


@pytest.mark.usefixtures("patient")
async def test_calls_that_wait_for_answers_keep_to_the_worker_chosen_for_each() -> None:
    """The same audio goes to its owner, though many calls of one HTTP request come together."""
    ledger = WorkLedger()
    replicas = [AnsweringReplica(f"w{n}", WorkerLoad(0.0, window_s=0.1)) for n in range(60)]
    router = make_asking_router(replicas, ledger)
    assert router._sample is not None
    audio = [replace(request(n), audio_key=bytes([n]) * 32) for n in range(100)]
    owners = {router._sample.owner(shared_key(one)): one for one in audio}
    for one in owners.values():
        ledger.begin(key_of(one))
    chosen = await asyncio.gather(*(assigned(router, one) for one in owners.values()))
    assert len(owners) > 20
    assert [one.replica_id for one in chosen] == list(owners)


async def test_a_silent_worker_delays_no_window_for_long_and_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_choice_hook, "ANSWER_S", 0.3)
    monkeypatch.setattr(load_sample, "FRESH_S", 60.0)
    ledger = WorkLedger()
    good = [AnsweringReplica(f"good{n}", WorkerLoad(9.0, window_s=0.1)) for n in range(3)]
    silent = [AnsweringReplica(f"silent{n}", WorkerLoad(), silent_s=60.0) for n in range(3)]
    router = make_asking_router([*good, *silent], ledger)
    chosen = []
    for window in range(20):
        ledger.begin(key_of(request(window)))
        chosen.append(await assigned(router, request(window)))
    known = [one for one in chosen if one in good]
    assert len(known) >= 17, "the first ones come before anybody has answered"


@pytest.mark.usefixtures("patient")
async def test_what_comes_and_goes_in_a_large_pool_is_followed() -> None:
    ledger = WorkLedger()
    replicas = [AnsweringReplica(f"w{n}", WorkerLoad(window_s=0.1)) for n in range(20)]
    router = make_asking_router(replicas, ledger)
    ledger.begin(key_of(request(0)))
    gone = await assigned(router, request(0))
    router.update_replicas([one for one in replicas if one is not gone])
    assert ledger.work(gone.replica_id) == 0.0
    for window in range(1, 30):
        ledger.begin(key_of(request(window)))
        assert await assigned(router, request(window)) is not gone


def test_serve_s_router_is_entered_where_ours_asks_first() -> None:
    """`LoadAwareRouter` overrides two methods of Serve's that are not public."""
    source = inspect.getsource(importlib.import_module("ray.serve._private.router"))
    assert "._choose_replica_for_request(" in source
    for name in ("_choose_replica_for_request", "_update_router_queue_len_gauge"):
        ours, usual = getattr(LoadAwareRouter, name), getattr(RequestRouter, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(usual).parameters)


def test_only_pools_of_many_workers_are_asked() -> None:
    few, many = (
        replica_choice(most)["request_router_config"] for most in (TOLD_WORKERS, TOLD_WORKERS + 1)
    )
    assert few.request_routing_stats_period_s == STATS_PERIOD_S
    alone = replica_choice(1)["request_router_config"]
    assert alone.request_routing_stats_period_s > STATS_PERIOD_S, "there is nothing to choose"
    assert few.request_router_kwargs == {}
    assert many.request_routing_stats_period_s >= 600, "each report of each goes to each router"
    assert many.request_router_kwargs == {"asks": True}


def test_the_controller_of_a_large_pool_is_asked_for_no_more_a_second() -> None:
    """Beyond some hundred workers; below that nothing is slower."""
    assert pace(1) == pace(PACED_WORKERS) == 1.0
    assert 10_000 / pace(10_000) == PACED_WORKERS


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
