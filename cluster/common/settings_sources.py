"""Settings from a YAML file, the environment and the command line; and files of keys.

Command-line flags override `SPLITSCRIBE_*` variables, these the file, and it the defaults. No other
module reads the environment for settings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from cluster.common.errors import ConfigurationError
from cluster.common.settings import ModelSettings, Settings
from cluster.common.settings.router import named_key

Fields = tuple[str, ...]  # the path of a setting, such as ("router", "port")

ENV_PREFIX = "SPLITSCRIBE_"
LIST_VARIABLES = (  # texts separated by commas, or a list in JSON
    "served_model_names",
    "aliases",
    "api_key",
    "cors_origins",
    "hosts",
    "allowed_hosts",
    "private_networks",
    "webhook_hosts",
)
SECRETS = {"api_key", "cluster_key", "webhook_secret"}  # never shown

# What Kubernetes sets in every pod for a Service splitscribe, or splitscribe-*.
_SERVICE_VARIABLE = re.compile(
    r"SPLITSCRIBE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")  # of SPLITSCRIBE_PORT, and the like


def load_settings(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge file, environment and flags into one checked object.

    flags: nested; None values are left out. environ: the process's by default;
    `SPLITSCRIBE_ROUTER__PORT=9000` sets `router.port`. Raises ConfigurationError, which names the
    field, what came and what is allowed.
    """
    merged = read_fields(file, "settings file")
    variables = _variables(os.environ if environ is None else environ)
    _merge(merged, _from_variables(variables))
    given = _without_none(flags or {})
    _merge(merged, given)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        names = {path: name for path, (name, _) in variables.items() if not _sets(given, path)}
        raise ConfigurationError(_explain(error, names)) from error


def read_fields(
    file: Path | None, what: str, flags: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A mapping from a YAML file, with flags over it; errors as `load_settings`."""
    content = None if file is None else read_yaml(file, what)
    if not isinstance(content, dict | None):
        raise ConfigurationError(f"{what} {file} must hold a mapping of fields")
    merged = content or {}
    _merge(merged, _without_none(flags or {}))
    return merged


def read_yaml(file: Path, what: str, remedy: str = "") -> Any:
    """Raises ConfigurationError if there is no YAML; `what` and `remedy` are for messages."""
    try:
        with file.open("rb") as stream:  # errors in a text quote its lines, which hold keys
            return yaml.safe_load(stream)
    except OSError as error:
        raise ConfigurationError(f"cannot read {what} {file}: {error.strerror}{remedy}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{what} {file} is not YAML: {error}") from error


def _variables(environ: Mapping[str, str]) -> dict[Fields, tuple[str, str]]:
    """Name and text of each variable, by the path of its setting."""
    return {
        tuple(name[len(ENV_PREFIX) :].lower().split("__")): (name, text)
        for name, text in environ.items()
        if name.startswith(ENV_PREFIX) and not _is_of_service(name, text)
    }


def _is_of_service(name: str, text: str) -> bool:
    """Whether Kubernetes set the variable. No name of a Service has two underscores."""
    if "__" in name:
        return False
    has_url = name.endswith("_PORT") and _SERVICE_URL.fullmatch(text) is not None
    return has_url or _SERVICE_VARIABLE.fullmatch(name) is not None


def _from_variables(variables: Mapping[Fields, tuple[str, str]]) -> dict[str, Any]:
    """Raises ConfigurationError if one sets a part of what another sets, or is no list."""
    nested: dict[str, Any] = {}
    for path, (name, text) in sorted(variables.items()):  # a whole comes before its parts
        node = nested
        for depth, group in enumerate(path[:-1], start=1):
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                whole, _ = variables[path[:depth]]
                raise ConfigurationError(
                    f"the variable {name} sets a part of what {whole} sets as a whole; unset one"
                )
        node[path[-1]] = _listed(name, text) if path[-1] in LIST_VARIABLES else text
        if path[-1] == "api_key" and not node["api_key"]:
            node["api_key"] = ("",)  # is refused: an empty variable must not open the server
    return nested


def _listed(name: str, text: str) -> tuple[Any, ...]:
    if not text.strip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return tuple(json.loads(text))
    except ValueError:  # whose message would show keys
        raise ConfigurationError(
            f"the variable {name} is not a list in JSON: write its values with commas between them"
        ) from None


def _sets(given: Mapping[str, Any], path: Fields) -> bool:
    for name in path:
        if not isinstance(given, Mapping) or name not in given:
            return False
        given = given[name]
    return True


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


def _explain(error: ValidationError, variables: Mapping[Fields, str]) -> str:
    lines = []
    for item in error.errors():
        path = tuple(map(str, item["loc"]))
        where = ".".join(path)
        names = [variables[path[:n]] for n in range(1, len(path) + 1) if path[:n] in variables]
        if item["type"] == "extra_forbidden":
            lines.append(_unknown(path, names))
            continue
        whence = f" (from the variable {names[0]})" if names else ""
        came = item.get("input")
        # Mappings and lists may hold keys, which must not end up in a log.
        hides = not isinstance(came, str | int | float | None) or SECRETS & set(path)
        got = "" if hides else f" (got {came!r})"
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{where}{whence}: {message}{got}" if where else f"{message}{got}")
    return "settings do not fit: " + "; ".join(lines)


def _unknown(path: Fields, variables: list[str]) -> str:
    inside = _settings_of(ModelSettings, path[:2]) if path[0] == "models" else ()
    known = {".".join(one): one for one in (*inside, *_settings_of(Settings))}
    where = ".".join(path)
    same = [name for name, one in known.items() if one[-1] == path[-1]]
    near = (same if len(same) == 1 else []) or get_close_matches(where, known, n=1, cutoff=0.7)
    meant = near[0] if near else ""
    if variables and near:
        meant = ENV_PREFIX + "__".join(known[meant]).upper()
    what = (
        f"the variable {variables[0]} is not a setting"
        if variables
        else f"there is no setting {where}"
    )
    return f"{what}; did you mean {meant}?" if meant else what


def _settings_of(model: type[BaseModel], path: Fields = ()) -> Iterator[Fields]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _settings_of(kind, (*path, name))
        else:
            yield (*path, name)


def first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    return f"{place}: {problem['msg']}"


def read_api_keys(file: Path) -> tuple[str, ...]:
    """Read a key from each line: KEY, or NAME KEY. A line may be blank or a # comment.

    Raises ConfigurationError if the file cannot be read, holds no key, or has another line.
    """
    try:
        lines = file.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read API keys from {file}: {error}") from error
    keys = {n: text for n, line in enumerate(lines, 1) if (text := line.strip()) and text[0] != "#"}
    if not keys:
        raise ConfigurationError(f"there is no API key in {file}")
    for number, text in keys.items():
        try:
            named_key(text)
        except ValueError as error:
            raise ConfigurationError(f"line {number} of {file}: {error}") from error
    return tuple(keys.values())
