"""Every shipped configuration is what Ray's own code takes, and asks for what the others offer."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.config import shell_environment, shipped_config, shipped_configs
from cluster.common.errors import ConfigurationError
from cluster.common.settings import Settings
from cluster.serve.from_file import IMPORT_PATH, settings_of
from cluster.serve.ray_environment import ENVIRONMENT
from cluster.serve.ray_internals import prepared_cluster_file

CLUSTERS = ["cluster/aws", "cluster/gcp", "cluster/onprem"]
APPLICATIONS = ["serve/cpu", "serve/one-model", "serve/several-models"]
DOCKERFILES = ["docker/cpu", "docker/cuda"]


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(shipped_config(name).path.read_text())
    return content


def application(content: dict[str, Any]) -> Settings:
    from ray.serve.schema import ServeDeploySchema

    (only,) = ServeDeploySchema.model_validate(content).applications
    assert only.import_path == IMPORT_PATH
    return settings_of(only.args, environ={})


def test_all_of_them_are_listed_with_what_they_are_for() -> None:
    found = {one.name: one.about for one in shipped_configs()}
    every = {*CLUSTERS, *APPLICATIONS, *DOCKERFILES, "kuberay", "settings", "helm/values"}
    assert set(found) >= every
    assert not any("templates" in name for name in found)
    assert all(found.values())


def test_a_name_is_found_by_its_last_part_and_with_its_ending() -> None:
    assert shipped_config("onprem.yaml").name == "cluster/onprem"
    with pytest.raises(ConfigurationError, match="docker/cpu, serve/cpu"):
        shipped_config("cpu")
    with pytest.raises(ConfigurationError, match="cluster/aws"):
        shipped_config("azure")


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_file_is_what_the_launcher_takes(name: str) -> None:
    prepared = prepared_cluster_file(load(name))
    commands = "\n".join(prepared["setup_commands"])
    assert "splitscribe-*.whl" in commands
    assert "UCX_NET_DEVICES" not in commands, "it would outdo what a node finds by itself"
    assert "splitscribe config env >" in commands
    assert "~/.ray/auth_token" in prepared["file_mounts"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_node_installs_the_wheel_that_came_last(name: str, tmp_path: Path) -> None:
    """Ray's launcher deletes nothing on a node, so that of another version lies beside it."""
    wheels, programs = tmp_path / "splitscribe-wheel", tmp_path / "splitscribe/bin"
    wheels.mkdir()
    programs.mkdir(parents=True)
    pip = programs / "pip"
    pip.write_text('#!/bin/sh\necho "$@" >> ~/installed\n')
    pip.chmod(0o755)
    before, now = (wheels / f"splitscribe-{one}-py3-none-any.whl" for one in ("0.2.0", "0.1.0"))
    before.touch()
    while not now.exists() or now.stat().st_ctime_ns <= before.stat().st_ctime_ns:
        now.touch()
    os.utime(now, (0, 0))  # rsync keeps the time at which a wheel was made
    for command in load(name)["setup_commands"]:
        if "splitscribe-wheel" in command:
            subprocess.run(["bash", "-c", command], env={"HOME": str(tmp_path)}, check=True)
    said = (tmp_path / "installed").read_text()
    assert set(re.findall(r"[\w.-]+\.whl", said)) == {now.name}


@pytest.mark.parametrize("name", ["cluster/aws", "cluster/gcp"])
def test_a_cloud_has_a_node_type_for_each_role(name: str) -> None:
    types = load(name)["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    for role in ("router", "encoder", "decoder"):
        assert types[role]["labels"] == {"pool": role}
        assert 1 <= types[role]["min_workers"] < types[role]["max_workers"]
        assert types[role]["resources"].get("GPU", 0) == (role != "router")
    spot = types["encoder-spot"]
    assert spot["labels"] == {"pool": "encoder", "market": "spot"}
    assert (spot["min_workers"], spot["max_workers"]) == (0, 0)


def test_google_cloud_is_told_how_to_schedule_by_an_object() -> None:
    """As its API has it; Ray's own examples give it a list (ray-project/ray#46248)."""
    types = load("cluster/gcp")["available_node_types"]
    for role in ("encoder", "encoder-spot", "decoder"):
        assert types[role]["node_config"]["scheduling"]["onHostMaintenance"] == "TERMINATE"
    assert types["encoder-spot"]["node_config"]["scheduling"]["provisioningModel"] == "SPOT"


@pytest.mark.parametrize("name", APPLICATIONS)
def test_an_application_is_what_serve_and_we_take(name: str) -> None:
    assert application(load(name)).placement == "split"


@pytest.mark.parametrize("name", ["serve/one-model", "serve/several-models"])
def test_what_an_application_asks_for_is_in_each_cluster(name: str) -> None:
    settings = application(load(name))
    assert settings.handoff == "encoder_states", "of large-v3's KV a node's network takes few"
    for cluster in ("cluster/aws", "cluster/gcp"):
        types = load(cluster)["available_node_types"].values()
        for own in settings.by_model().values():
            for role in (own.encoder, own.decoder):
                assert role.device == "cuda"
                assert role.gpus
                pool = role.node_labels["pool"]
                fitting = [one for one in types if one["labels"]["pool"] == pool]
                assert fitting
                assert all(one["resources"]["GPU"] >= role.gpus for one in fitting)
        assert settings.router.node_labels["pool"] == "!head"
        assert {one["labels"]["pool"] for one in types} > {"head"}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_sets_the_environment_and_copies_what_make_wheel_leaves(name: str) -> None:
    text = shipped_config(name).path.read_text().replace("\\\n", " ")
    instructions = [line for line in text.splitlines() if line and not line.startswith("#")]
    known = "FROM|ARG|RUN|COPY|ENV|USER|WORKDIR|EXPOSE|HEALTHCHECK|CMD"
    assert all(re.match(rf"({known}) \S", line) for line in instructions)
    (environment,) = (line for line in instructions if line.startswith("ENV RAY"))
    assert dict(part.split("=", 1) for part in environment.split()[1:]) == ENVIRONMENT
    assert "COPY dist/splitscribe-*.whl dist/constraints.txt /tmp/wheel/" in instructions
    assert re.search(r"\.whl\)\[bulk,(gpu,)?otel\]", text), "a container installs nothing later"
    user = next(i for i, line in enumerate(instructions) if line == "USER ray")
    assert instructions[-1].startswith("CMD")
    assert not any(line.startswith(("RUN", "COPY")) for line in instructions[user:])
    for line in instructions:
        if line.startswith("RUN"):
            subprocess.run(["sh", "-n", "-c", line.removeprefix("RUN ")], check=True)


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_models_of_a_container_outlive_it_and_its_user_may_write_them(image: str) -> None:
    """Docker makes a new volume from the folder of the image, with its owner."""
    name = {"cpu": "docker/compose", "cuda": "docker/compose-cuda"}[image]
    (service,) = load(name)["services"].values()
    assert service["image"] == f"splitscribe:{image}"
    assert {"cpus", "memory"} <= service["deploy"]["resources"]["limits"].keys()
    folders = [one.split(":")[1] for one in service["volumes"]]
    assert folders[0] == "/home/ray/.cache/huggingface"  # as huggingface_hub has it
    text = shipped_config(f"docker/{image}").path.read_text()
    assert f"-v models:{folders[0]}" in text
    owned = re.search(r"install --directory --owner=ray (\S+) (\S+)", text)
    assert owned is not None
    assert set(folders) <= set(owned.groups())
    assert " ".join(service["healthcheck"]["test"][1:]) in text


def test_a_shell_takes_the_environment() -> None:
    script = (
        shell_environment({"A": "with space", "B": "$HOME"}) + '\necho "$A|$B"; command -v python'
    )
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    said, found = run.stdout.splitlines()
    assert said == "with space|$HOME"
    assert found == shlex.split(script.split("PATH=")[1])[0].removesuffix(":$PATH") + "/python"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"router": {"api_key": "secret"}}, "api_key_file"),
        ({"cluster_key": "secret"}, "SPLITSCRIBE_CLUSTER_KEY"),
        ({"batches": {"webhook_secret": "secret"}}, "SPLITSCRIBE_BATCHES__WEBHOOK_SECRET"),
        ({"router": {"port": 9000}}, r"http_options\.port"),
        ({"encoder": {"replica": 2}}, r"encoder\.replica"),
        ({"encoder": {"node_labels": {"pool": 1}}}, r"encoder\.node_labels\.pool"),
        ({"router": "demo"}, "router"),
    ],
)
def test_what_does_not_belong_into_an_application_is_named(
    args: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        settings_of(args, environ={})
    assert "secret" not in str(caught.value)
