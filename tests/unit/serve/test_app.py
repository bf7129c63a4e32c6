"""What the application asks of Ray Serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.constants import REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ServeStatus,
)

from cluster.common.settings_sources import load_settings
from cluster.serve import app
from cluster.serve.from_file import build
from cluster.serve.placement import Placement

HOW = DeploymentStatusTrigger.CONFIG_UPDATE_COMPLETED


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each deployment is asked to be, by name."""
    found: dict[str, Any] = {}
    monkeypatch.setattr("ray.serve.deployment", lambda *_, **asked: Deployment(found, asked))
    return found


def build_app(kind: Any = "split", **flags: Any) -> None:
    app.build_app(load_settings(None, flags, environ={}), "build", Placement(kind, "a test"))


def test_routers_and_the_batch_owner_may_be_busy_for_15_s_and_workers_may_not(
    options: dict[str, Any], tmp_path: Path
) -> None:
    build_app(batches={"folder": str(tmp_path)})
    failed = REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD
    patience_s = {name: failed * asked["health_check_timeout_s"] for name, asked in options.items()}
    assert patience_s.keys() == {"router", "batches", "encoder", "decoder"}
    assert min(patience_s["router"], patience_s["batches"]) > 15
    assert max(patience_s["encoder"], patience_s["decoder"]) <= 6


@pytest.mark.parametrize(
    ("kind", "pools"), [("split", {"encoder", "decoder"}), ("colocated", {"worker"})]
)
def test_whoever_sends_windows_knows_how_many_workers_each_pool_has(
    kind: Any, pools: set[str], options: dict[str, Any]
) -> None:
    build_app(kind)
    ours = {name for name, asked in options.items() if "request_router_config" in asked}
    assert ours == pools


def test_a_worker_on_cpus_reserves_what_it_is_told(options: dict[str, Any]) -> None:
    build_app(encoder={"cpus": 7, "gpus": 0})
    claims = {name: asked["ray_actor_options"]["num_cpus"] for name, asked in options.items()}
    assert claims == {"router": 0, "encoder": 7, "decoder": 0}
    assert options["encoder"]["max_surge_percent"] == 0, "a new one may fit when an old one ends"


@pytest.mark.parametrize(("running", "begins"), [(0, 2), (6, 6), (12, 8)])
def test_a_new_version_begins_with_as_many_workers_as_run(
    running: int, begins: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.cluster_resources", dict)
    monkeypatch.setattr("cluster.serve.from_file.shared_value", lambda *_: b"k" * 32)
    encoders = DeploymentStatusOverview(DeploymentStatus.HEALTHY, HOW, {"RUNNING": running}, "")
    whole = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {"encoder": encoders})
    status = ServeStatus(applications={"splitscribe": whole})
    monkeypatch.setattr("ray.serve.status", lambda: status)
    build({"encoder": {"replicas": 2, "max_replicas": 8, "device": "cpu"}, "placement": "split"})
    assert options["encoder"]["autoscaling_config"].initial_replicas == begins
    assert options["decoder"]["num_replicas"] == 1


class Deployment:
    def __init__(self, into: dict[str, Any], asked: dict[str, Any]) -> None:
        into[asked["name"]] = asked

    def __call__(self, *_: Any) -> Deployment:
        return self

    def bind(self, *_: Any) -> Deployment:
        return self
