"""Serve configurations are checked before they are sent; what Serve tells becomes lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.cli.operate.application import read_serve_file, state_of
from cluster.cli.shipped import shipped_config
from cluster.errors import ConfigurationError

WAITING = "Deployment 'encoder' has 1 replicas that have taken more than 30s to be scheduled."


def deployment(n_running: int, wanted: int, message: str = "") -> dict[str, Any]:
    states = ["RUNNING"] * n_running + ["STARTING"] * (wanted - n_running)
    return {
        "status": "HEALTHY" if n_running == wanted else "UPDATING",
        "message": message,
        "target_num_replicas": wanted,
        "replicas": [{"state": state} for state in states],
    }


def details(status: str, message: str = "", **deployments: Any) -> dict[str, Any]:
    return {
        "applications": {
            "splitscribe": {
                "status": status,
                "message": message,
                "last_deployed_time_s": 1.0,
                "deployments": deployments,
            }
        }
    }


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("import_path: cluster.serve.from_file:build", "import_path: other:app", "import_path"),
        ("route_prefix: /", "route_prefix: /\n    host: 0.0.0.0", "Host"),
        ("model: demo", "modle: demo", "modle"),
        ("applications:", "application:", "applications"),
        ("      model: demo", "      router: {api_key: secret}", "api_key_file"),
    ],
)
def test_what_would_fail_on_the_cluster_is_told_here(
    tmp_path: Path, old: str, new: str, named: str
) -> None:
    text = shipped_config("serve/cpu").path.read_text()
    assert old in text
    file = tmp_path / "serve.yaml"
    lines = text.replace(old, new)
    if "router: {" in new:
        lines = lines.replace("      router:\n", "")
    file.write_text(lines)
    with pytest.raises(ConfigurationError, match=named):
        read_serve_file(file)


def test_progress_is_a_line_and_a_reason() -> None:
    state = state_of(
        details(
            "DEPLOYING",
            decoder=deployment(2, 2),
            encoder=deployment(0, 1, WAITING),
            router=deployment(1, 1),
        )
    )
    assert state is not None
    assert state.line() == "router 1/1, encoder 0/1, decoder 2/2"
    assert state.reason() == WAITING
    assert not state.is_ready


def test_a_failure_is_the_message_of_its_exception() -> None:
    trace = "Traceback:\n  File x\ncluster.errors.CheckpointError: no such folder: /x\n"
    state = state_of(details("DEPLOY_FAILED", trace))
    assert state is not None
    assert state.reason() == "no such folder: /x"
    assert not state.is_ready


def test_an_application_is_ready_when_all_that_is_wanted_runs() -> None:
    state = state_of(details("RUNNING", router=deployment(1, 1)))
    assert state is not None
    assert state.is_ready
    assert state_of({"applications": {}}) is None
