"""A Serve configuration, checked before it is sent to a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.common.errors import ConfigurationError
from cluster.common.settings import Settings
from cluster.common.settings_sources import read_yaml
from cluster.serve.from_file import IMPORT_PATH, settings_of

HTTP_PORT = 8000


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A Serve configuration that was checked. content: the whole file, as Serve takes it."""

    content: Mapping[str, Any]
    settings: Settings
    application: str
    port: int


def read_serve_file(path: Path) -> ServeFile:
    """Check a file as Serve will, and its `args` as the build on the cluster will.

    Raises:
        ConfigurationError: a field is wrong; the message names it.
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


def http_port(details: Mapping[str, Any]) -> int:
    """Where Serve's proxies listen."""
    return int((details.get("http_options") or {}).get("port") or HTTP_PORT)
