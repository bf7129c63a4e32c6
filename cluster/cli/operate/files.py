"""Read and check an operator's files: a cluster file of `ray up` and a Serve configuration."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.common.errors import ConfigurationError
from cluster.common.extras import require_extra
from cluster.common.settings import Settings
from cluster.common.settings_sources import first_problem, read_yaml
from cluster.serve.from_file import IMPORT_PATH, settings_of
from cluster.serve.ray_environment import APP_NAME
from cluster.serve.ray_internals import prepared_cluster_file

TOKEN_FILE = Path("~/.ray/auth_token")
CLOUD_MODULES = {"aws": "boto3", "gcp": "googleapiclient"}
OTHER_NODES = "worker"  # the pool of nodes that have no label
HTTP_PORT = 8000


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """head_address: None where a cloud assigns it. least_nodes: pool -> nodes, without the head."""

    path: Path
    provider: str
    head_address: str | None
    worker_addresses: tuple[str, ...]
    least_nodes: Mapping[str, int]
    auth: Mapping[str, Any]
    file_mounts: Mapping[str, str]

    @property
    def is_onprem(self) -> bool:
        return self.provider == "local"

    def environment(self) -> dict[str, str]:
        # Ray's newer autoscaler counts the head as a worker on machines of one's own.
        version = "0" if self.is_onprem else "1"
        return {"RAY_UP_enable_autoscaler_v2": version, **os.environ}

    def ssh(self, address: str) -> list[str]:
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        options += ["ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
        if proxy := self.auth.get("ssh_proxy_command"):
            options.append(f"ProxyCommand={proxy}")
        command = ["ssh", *(part for option in options for part in ("-o", option))]
        if key := self.auth.get("ssh_private_key"):
            command += ["-i", str(Path(key).expanduser())]
        return [*command, f"{self.auth['ssh_user']}@{address}"]


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises ConfigurationError: Ray's launcher would refuse the file."""
    import jsonschema

    content = read_yaml(
        path, "cluster file", "; begin with: splitscribe config show cluster/onprem > cluster.yaml"
    )
    if not isinstance(content, dict) or not isinstance(content.get("provider"), dict):
        raise ConfigurationError(f"{path} is not a cluster file: it has no provider")
    try:
        prepared = prepared_cluster_file(content)
    except jsonschema.ValidationError as error:
        where = ".".join(str(part) for part in error.absolute_path)
        raise ConfigurationError(f"{path}: {where or 'the file'}: {error.message}") from error
    except Exception as error:  # the launcher's errors have no common class
        raise ConfigurationError(f"{path}: Ray's launcher refuses it: {error}") from error
    provider = prepared["provider"]
    workers = tuple(str(one) for one in provider.get("worker_ips", ()))
    head = provider.get("external_head_ip") or provider.get("head_ip")
    return ClusterFile(
        path=path.resolve(),
        provider=provider["type"],
        head_address=None if head is None else str(head),
        worker_addresses=workers,
        least_nodes={OTHER_NODES: len(workers)} if workers else _least_nodes(prepared),
        auth=prepared.get("auth", {}),
        file_mounts=prepared.get("file_mounts", {}),
    )


def _least_nodes(prepared: Mapping[str, Any]) -> Counter[str]:
    """The least number of nodes with each label `pool`: {"encoder": 1, "decoder": 2}."""
    least: Counter[str] = Counter()
    for name, node_type in prepared["available_node_types"].items():
        if name != prepared["head_node_type"]:
            pool = node_type.get("labels", {}).get("pool", OTHER_NODES)
            least[pool] += node_type.get("min_workers", 0)
    return least


def check_sources(file: ClusterFile) -> None:
    """Raises ConfigurationError: a file, key, wheel or package that a launch needs is missing."""
    if file.provider in CLOUD_MODULES:
        require_extra(file.provider, CLOUD_MODULES[file.provider])
    key = file.auth.get("ssh_private_key")
    if key and not Path(key).expanduser().is_file():
        raise ConfigurationError(f"auth.ssh_private_key: the file {key} does not exist")
    for target, source in file.file_mounts.items():
        here = Path(source).expanduser()
        if "splitscribe-wheel" in target:
            _check_wheel(here)
        elif not here.exists():
            raise ConfigurationError(
                f"file_mounts: {source}, which is to be copied to {target}, does not exist"
            )


def _check_wheel(folder: Path) -> None:
    wheels = sorted(folder.glob("splitscribe-*.whl"))
    if len(wheels) != 1:
        found = ", ".join(one.name for one in wheels) or "none"
        raise ConfigurationError(
            f"file_mounts: {folder.resolve()} must hold one wheel of splitscribe, found {found}; "
            f"run `make wheel` in its sources"
        )
    if not (folder / "constraints.txt").is_file():
        raise ConfigurationError(
            f"file_mounts: {folder.resolve()} has no constraints.txt, which `make wheel` puts there"
        )


def ensure_token() -> bool:
    """Create the token of the cluster's clients. Return False where there was one."""
    path = TOKEN_FILE.expanduser()
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return True


def read_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Look for the token in the same places and order as Ray."""
    if token := environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or TOKEN_FILE).expanduser()
    return path.read_text().strip() or None if path.is_file() else None


@dataclass(frozen=True, slots=True)
class ServeFile:
    content: Mapping[str, Any]
    settings: Settings
    port: int


def read_serve_file(path: Path) -> ServeFile:
    """Check the file by Serve's schema and its `args` by the settings of this build."""
    from ray.serve.schema import ServeDeploySchema

    content = read_yaml(
        path, "Serve configuration", "; begin with: splitscribe config show serve/cpu > serve.yaml"
    )
    try:
        applications = ServeDeploySchema.model_validate(content).applications
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {first_problem(error)}") from error
    args = [o.args for o in applications if (o.name, o.import_path) == (APP_NAME, IMPORT_PATH)]
    if len(args) != 1:
        raise ConfigurationError(
            f"{path} must have one application with the name {APP_NAME} and import_path "
            f"{IMPORT_PATH}, it has {len(args)}"
        )
    return ServeFile(content, settings_of(args[0]), http_port(content))


def http_port(content: Mapping[str, Any]) -> int:
    return int((content.get("http_options") or {}).get("port") or HTTP_PORT)
