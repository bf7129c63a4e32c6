"""Serve's hooks do what Serve's interface wants of them, whatever comes."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
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

from cluster.common.messages import EncodeRequest
from cluster.common.settings import ScalingSettings
from cluster.serve import own_calls, replica_count, worker_choice
from cluster.serve.hooks import LoadAwareRouter, PoolPolicy
from cluster.serve.own_calls import OwnCalls, key_of
from cluster.serve.worker_choice import shared_key

DEPLOYMENT = DeploymentID("encoder", "hooks")


class Replica:
    max_ongoing_requests = 64
    routing_stats: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.replica_id, self.node_id = ReplicaID(name, DEPLOYMENT), f"node-{name}"

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def make_replicas(count: int) -> list[Any]:
    return [Replica(f"w{n}") for n in range(count)]


def make_pending(*args: Any) -> Any:
    return SimpleNamespace(args=args, routing_context=SimpleNamespace(should_backoff=False))


def make_router(replicas: list[Any], calls: OwnCalls | None = None) -> LoadAwareRouter:
    router = LoadAwareRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, None, None, True)
    router.initialize_state(calls=calls or OwnCalls(), chance=random.Random(0))
    router.update_replicas(replicas)
    return router


def request(window: int) -> EncodeRequest:
    return EncodeRequest("hooks", window, 1, np.zeros(16, np.int16), 30.0)


async def test_windows_that_come_together_are_spread() -> None:
    calls, replicas = OwnCalls(), make_replicas(3)
    router = make_router(replicas, calls)
    firsts = []
    for window in range(6):
        calls.begin(key_of(request(window)))
        pending = make_pending(request(window))
        order = await router.choose_replicas(replicas, pending)
        assert pending.routing_context.should_backoff
        assert sorted(str(rank[0].replica_id) for rank in order) == sorted(
            str(one.replica_id) for one in replicas
        )
        firsts.append(order[0][0])
    assert Counter(firsts) == dict.fromkeys(replicas, 2)
    for window in range(6):
        calls.end(key_of(request(window)))
    assert [calls.load(one.replica_id).work for one in replicas] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("count", [5, 50])
async def test_a_full_pool_costs_few_questions(count: int) -> None:
    """Serve asks every replica of the answer that it takes for full, one after another."""
    replicas = make_replicas(count)
    order = await make_router(replicas).choose_replicas(replicas, make_pending(request(0)))
    assert [len(rank) for rank in order] == [1, 1, 1]


async def assigned(router: LoadAwareRouter, request: EncodeRequest) -> Any:
    metadata = RequestMetadata("http", "internal")  # the same for all calls of one HTTP request
    pending = PendingRequest(args=[request], kwargs={}, metadata=metadata)
    replica = await router._choose_replica_for_request(pending)
    router.on_request_routed(pending, replica.replica_id, None)  # type: ignore[arg-type]
    return replica


async def test_calls_that_come_together_keep_to_the_worker_chosen_for_each() -> None:
    calls, replicas = OwnCalls(), make_replicas(60)
    router = make_router(replicas, calls)
    audio = [replace(request(n), audio_key=bytes([n]) * 32) for n in range(100)]
    owners = {router._members.owner(shared_key(one)): one for one in audio}
    for one in owners.values():
        calls.begin(key_of(one))
    chosen = await asyncio.gather(*(assigned(router, one) for one in owners.values()))
    assert len(owners) > 20
    assert [one.replica_id for one in chosen] == list(owners)


async def test_what_comes_and_goes_is_followed() -> None:
    calls, replicas = OwnCalls(), make_replicas(20)
    router = make_router(replicas, calls)
    assert calls.sizes == {str(DEPLOYMENT): 20}
    calls.begin(key_of(request(0)))
    gone = await assigned(router, request(0))
    router.update_replicas([one for one in replicas if one is not gone])
    assert calls.load(gone.replica_id).work == 0.0
    assert calls.sizes == {str(DEPLOYMENT): 19}
    for window in range(1, 30):
        calls.begin(key_of(request(window)))
        assert await assigned(router, request(window)) is not gone


def test_the_metric_that_a_large_pool_does_not_export_is_serve_s() -> None:
    """`LoadAwareRouter` overrides a method of Serve's that is not public."""
    name = "_update_router_queue_len_gauge"
    ours, usual = getattr(LoadAwareRouter, name), getattr(RequestRouter, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(usual).parameters)


def test_hooks_sent_by_value_share_what_lives_in_the_process() -> None:
    """What was noted, or a balancer, sent along with them would be a copy that nobody else sees."""
    config: Any = RequestRouterConfig
    choice = config(request_router_class="cluster.serve.hooks.LoadAwareRouter")
    received = choice.get_request_router_class()
    assert received.on_request_routed.__globals__["work_of"] is worker_choice.work_of
    assert received.initialize_state.__globals__["own_calls"] is own_calls
    sent = AutoscalingPolicy(policy_function="cluster.serve.hooks:PoolPolicy")  # type: ignore[no-untyped-call]
    assert sent.get_policy().__call__.__globals__["replica_count"] is replica_count
    assert replica_count.balancer_of("a", "m") is replica_count.balancer_of("a", "m")
    assert replica_count.balancer_of("a", "m") is not replica_count.balancer_of("a", "n")


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
        "current_time": 1e9,
    }
    return SimpleNamespace(**usual | told)


def make_policy(**rules: Any) -> PoolPolicy:
    settings = ScalingSettings(**{"upscale_delay_s": 0.0} | rules)
    return PoolPolicy("encoder", "hooks", settings.model_dump())


def test_a_policy_reads_what_workers_tell_although_the_clock_was_set_back() -> None:
    policy, busy = make_policy(), {"a": 1.0, "b": 1.0}
    assert policy(make_context(app_name="clock")) == (2, {})
    told = {"busy": busy, "queue_s": {"a": 8.0, "b": 7.0}, "slack_s": {"a": 100.0, "b": 100.0}}
    told["unread"] = {"a": 0.0, "b": 0.0}
    an_hour_ago = make_context(app_name="clock", aggregated_metrics=told, current_time=1e9 - 3600)
    assert policy(an_hour_ago) == (5, {})


def test_a_policy_that_fails_leaves_things_as_they_are() -> None:
    context = make_context(aggregated_metrics={"busy": {"a": "very"}})
    assert make_policy()(context) == (2, {})
