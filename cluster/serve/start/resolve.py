"""Resolve the settings that must be the same in every process of a cluster."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import TypeVar

from cluster.common.errors import ConfigurationError
from cluster.common.settings import BUNDLED_MODEL, Listener, Settings
from cluster.common.settings_sources import read_api_keys

_Name = TypeVar("_Name", str, str | None)


def resolve_settings(settings: Settings) -> Settings:
    """Fill in key and port, and make paths absolute. Raises ConfigurationError: port taken."""
    return resolved(
        settings,
        cluster_key=settings.cluster_key or secrets.token_hex(32),
        port=_usable_port(settings.router.host, settings.router.port),
        listener=settings.router.listener,
    )


def resolved(settings: Settings, *, cluster_key: str, port: int, listener: Listener) -> Settings:
    """Raises ConfigurationError: the file of API keys is invalid. Routers read it themselves."""
    key_file = settings.router.api_key_file
    if key_file is not None:
        read_api_keys(key_file)
        if not key_file.parts[0].startswith("~"):  # each node resolves its own home
            key_file = key_file.absolute()
    models = {
        name: one.model_copy(update={"model": _absolute(one.model)})
        for name, one in settings.models.items()
    }
    return settings.model_copy(
        update={
            "model": _absolute(settings.model),
            "models": models,
            "cluster_key": cluster_key,
            "batches": settings.batches.model_copy(
                update={"folder": _absolute_path(settings.batches.folder)}
            ),
            "speakers": settings.speakers.model_copy(
                update={"model": _absolute(settings.speakers.model)}
            ),
            "router": settings.router.model_copy(
                update={"port": port, "listener": listener, "api_key_file": key_file}
            ),
        }
    )


def _absolute(model: _Name) -> _Name:
    if model is None or model == BUNDLED_MODEL:  # also where a folder has this name
        return model
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _absolute_path(folder: Path | None) -> Path | None:
    return None if folder is None else folder.expanduser().absolute()


def _usable_port(host: str, port: int) -> int:
    """Return `port`, or a free one for 0. Raises ConfigurationError: it cannot be used."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
            ) from error
        return int(probe.getsockname()[1])
