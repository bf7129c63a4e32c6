"""Where settings come from: a YAML file, the environment, the command line; and files of keys.

Order of precedence: command-line flags over `SPLITSCRIBE_*` variables over the file over the
defaults of `cluster.settings`. This is the only module that reads the environment for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from cluster.errors import ConfigurationError
from cluster.settings import Settings

ENV_PREFIX = "SPLITSCRIBE_"
LIST_VARIABLES = (  # texts with commas
    "served_model_names",
    "api_key",
    "cors_origins",
    "allowed_hosts",
    "private_networks",
    "webhook_hosts",
)


def load_settings(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge file, environment and flags into one checked object.

    Args:
        file: YAML with the fields of `Settings`.
        flags: nested mapping of what the command line set; None values are left out.
        environ: defaults to the process environment. `SPLITSCRIBE_ROUTER__PORT=9000` sets
            `router.port`; two underscores nest.

    Raises:
        ConfigurationError: names the field, what came and what is allowed.
    """
    merged: dict[str, Any] = {}
    if file is not None:
        content = read_yaml(file, "settings file")
        if not isinstance(content, dict | None):
            raise ConfigurationError(f"settings file {file} must hold a mapping of fields")
        _merge(merged, content or {})
    _merge(merged, _from_environ(os.environ if environ is None else environ))
    _merge(merged, _without_none(flags or {}))
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise ConfigurationError(_explain(error)) from error


def read_yaml(file: Path, what: str, remedy: str = "") -> Any:
    """The content of a file that a person wrote.

    Args:
        what: it is, for messages. remedy: what to do where it cannot be read.

    Raises:
        ConfigurationError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {what} {file}: {error.strerror}{remedy}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{what} {file} is not YAML: {error}") from error


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        path = name[len(ENV_PREFIX) :].lower().split("__")
        node = nested
        for part in path[:-1]:
            node = node.setdefault(part, {})
        is_list = path[-1] in LIST_VARIABLES
        texts = tuple(text.strip() for text in value.split(",") if text.strip())
        node[path[-1]] = texts if is_list else value
    return nested


def _without_none(flags: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in flags.items():
        if isinstance(value, Mapping):
            if inner := _without_none(value):
                kept[name] = inner
        elif value is not None:
            kept[name] = value
    return kept


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        came = item.get("input")
        # A mapping may hold keys, which must not end up in a log.
        hides = isinstance(came, Mapping | BaseModel) or where.endswith("_secret")
        got = "" if hides else f" (got {came!r})"
        lines.append(f"{where}: {item['msg']}{got}" if where else f"{item['msg']}{got}")
    return "settings do not fit: " + "; ".join(lines)


def read_api_keys(file: Path) -> tuple[str, ...]:
    """The keys of a file: one per line; blank lines and what follows a # do not count.

    Raises:
        ConfigurationError: it cannot be read, or holds none.
    """
    try:
        lines = file.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read API keys from {file}: {error}") from error
    keys = tuple(key for line in lines if (key := line.partition("#")[0].strip()))
    if not keys:
        raise ConfigurationError(f"there is no API key in {file}")
    return keys
