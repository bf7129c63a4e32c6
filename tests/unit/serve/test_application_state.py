"""What Serve tells of an application becomes lines that a person follows."""

from __future__ import annotations

from typing import Any

from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ServeStatus,
)

from cluster.serve.start.readiness import ApplicationState, Changes, Pool, state_here, state_of

WAITING = "Deployment 'encoder' has 1 replicas that have taken more than 30s to be scheduled."
ROUTER = Pool("router", 1, 1, "HEALTHY", "")


def deployment(n_running: int, wanted: int, message: str = "") -> dict[str, Any]:
    states = ["RUNNING"] * n_running + ["STARTING"] * (wanted - n_running)
    return {
        "status": "HEALTHY" if n_running == wanted else "UPDATING",
        "message": message,
        "target_num_replicas": wanted,
        "replicas": [{"state": state} for state in states],
    }


def test_progress_is_a_line_and_a_reason() -> None:
    deployments = {
        "decoder": deployment(2, 2),
        "encoder": deployment(0, 1, WAITING),
        "router": deployment(1, 1),
    }
    told = {"status": "DEPLOYING", "message": "", "deployments": deployments}
    state = state_of({"applications": {"splitscribe": told}})
    assert state is not None
    assert state.line() == "router 1/1, encoder 0/1, decoder 2/2"
    assert state.reason() == WAITING
    workers = "workers running: router 1/1, encoder 0/1, decoder 2/2"
    assert state.lines() == [workers, f"encoder: {WAITING}"]
    assert not state.is_ready
    assert state_of({"applications": {}}) is None


def test_a_model_that_loads_for_long_is_not_told_to_wait_for_something() -> None:
    slow = "1 replicas that have taken more than 30s to initialize.\nThis may be caused by ..."
    state = ApplicationState("DEPLOYING", "", (Pool("encoder", 0, 1, "UPDATING", slow),))
    assert state.lines() == ["workers running: encoder 0/1"]


def test_what_changes_is_said_once() -> None:
    said: list[str] = []
    progress = Changes(said.append)
    for lines in (("a", "b"), ("a", "b"), ("a", "c"), ("a",), ("b",)):
        progress.tell(*lines)
    assert said == ["a", "b", "c", "b"]


def test_a_failure_is_the_message_of_its_exception() -> None:
    trace = "Traceback:\n  File x\ncluster.errors.CheckpointError: no such folder: /x\n"
    state = ApplicationState("DEPLOY_FAILED", trace, (ROUTER,))
    assert state.reason() == "no such folder: /x"
    assert not state.is_ready
    assert ApplicationState("RUNNING", "", (ROUTER,)).is_ready


def test_the_state_of_this_cluster_reads_as_that_of_another() -> None:
    own: Any = DeploymentStatusOverview
    decoder = own(DeploymentStatus.UPDATING, "CONFIG_UPDATE_STARTED", {"RUNNING": 1}, "")
    encoder = own(DeploymentStatus.UPDATING, "CONFIG_UPDATE_STARTED", {"STARTING": 2}, WAITING)
    pools: Any = {"decoder": decoder, "encoder": encoder}
    whole: Any = ApplicationStatusOverview
    found = state_here(
        ServeStatus(
            applications={"splitscribe": whole(ApplicationStatus.DEPLOYING, "", 0.0, pools)}
        )
    )
    assert found is not None
    assert found.line() == "encoder 0/2, decoder 1/1"
    assert found.reason() == WAITING
    assert (found.status, found.is_ready) == ("DEPLOYING", False)
    assert state_here(ServeStatus()) is None
