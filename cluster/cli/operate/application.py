"""A Serve configuration, checked before it is sent, and the state of what came of it.

Knows Serve's words (application, deployment, replica) and turns them into lines that a person
follows: how many workers of each pool run, what they wait for, and why a deployment failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.errors import ConfigurationError
from cluster.serve.from_file import IMPORT_PATH, settings_of
from cluster.serve.ray_environment import APP_NAME
from cluster.settings import Settings
from cluster.settings_sources import read_yaml

HTTP_PORT = 8000


@dataclass(frozen=True, slots=True)
class ServeFile:
    """content: as Serve takes it."""

    content: Mapping[str, Any]
    settings: Settings
    application: str
    port: int


@dataclass(frozen=True, slots=True)
class Pool:
    """One deployment. message: what it waits for, or why it failed."""

    name: str
    running: int
    wanted: int
    status: str
    message: str

    @property
    def is_ready(self) -> bool:
        return self.status == "HEALTHY" and self.running >= self.wanted


@dataclass(frozen=True, slots=True)
class ApplicationState:
    """deployed_at: changes with each deployment."""

    status: str
    message: str
    pools: tuple[Pool, ...]
    deployed_at: float

    @property
    def is_ready(self) -> bool:
        return self.status == "RUNNING" and all(pool.is_ready for pool in self.pools)

    def line(self) -> str:
        """`router 1/1, encoder 0/2, decoder 2/2`"""
        return ", ".join(f"{pool.name} {pool.running}/{pool.wanted}" for pool in self.pools)

    def reason(self) -> str:
        """What went wrong: the message of the exception, which is the last line."""
        texts = [pool.message for pool in self.pools if not pool.is_ready and pool.message]
        for text in (*texts, self.message):
            if lines := [line.strip() for line in text.splitlines() if line.strip()]:
                return re.sub(r"^[\w.]+Error: ", "", lines[-1])
        return self.status


def read_serve_file(path: Path) -> ServeFile:
    """Check it as Serve will, and its `args` as the build on the cluster will.

    Raises:
        ConfigurationError: names the field.
    """
    content = read_yaml(
        path,
        "Serve configuration",
        "; begin with: splitscribe config show serve/cpu > serve.yaml",
    )
    applications = _checked(content, path).applications
    ours = [one for one in applications if one.import_path == IMPORT_PATH]
    if len(ours) != 1:
        raise ConfigurationError(
            f"{path} must have one application with import_path {IMPORT_PATH}, it has {len(ours)}"
        )
    port = (content.get("http_options") or {}).get("port", HTTP_PORT)
    return ServeFile(content, settings_of(ours[0].args), ours[0].name, port)


def _checked(content: Any, path: Path) -> Any:
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        return ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigurationError(f"{path}: {where}: {first['msg']}") from error


def state_of(details: Mapping[str, Any], application: str = APP_NAME) -> ApplicationState | None:
    """From what Ray's dashboard tells of Serve; None: there is no such application."""
    found = details.get("applications", {}).get(application)
    if found is None:
        return None
    pools = [
        Pool(
            name=name,
            running=sum(one["state"] == "RUNNING" for one in deployment["replicas"]),
            wanted=deployment["target_num_replicas"],
            status=deployment["status"],
            message=deployment.get("message", ""),
        )
        for name, deployment in found["deployments"].items()
    ]
    pools.sort(key=lambda pool: (pool.name != "router", pool.name.startswith("decoder"), pool.name))
    return ApplicationState(
        found["status"],
        found.get("message", ""),
        tuple(pools),
        float(found.get("last_deployed_time_s") or 0.0),
    )


def http_port(details: Mapping[str, Any]) -> int:
    """Where Serve's proxies listen."""
    return int((details.get("http_options") or {}).get("port") or HTTP_PORT)


def health_line(url: str) -> tuple[bool, str]:
    """Whether the API takes requests, and the state of each model's pools in words."""
    try:
        answer = httpx.get(f"{url}/health", timeout=10.0)
        pools = answer.json().get("pools", {})
    except (httpx.HTTPError, ValueError):
        return False, "does not answer"
    words = [
        f"{name}: {pool['replicas']} {'ready' if pool['ready'] else 'not ready'}"
        for name, pool in pools.items()
    ]
    return answer.status_code == 200, ", ".join(words) or f"HTTP {answer.status_code}"
