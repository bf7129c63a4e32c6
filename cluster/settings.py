"""Frozen settings, one model per role, composed into `Settings`; YAML file and environment.

Order of precedence: command-line flags over `SPLITSCRIBE_*` variables over the file over the
defaults here. This is the only module that reads the environment. "auto" is resolved once, by
the role that knows its hardware, into a new object.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from cluster.errors import ConfigurationError

ENV_PREFIX = "SPLITSCRIBE_"
BUNDLED_MODEL = "demo"

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Handoff = Literal["cross_kv", "encoder_states", "auto"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "float8"]
Transport = Literal["auto", "nixl", "memory"]
PlacementName = Literal["auto", "split", "colocated"]
Attention = Literal["auto", "flashinfer", "torch"]
Listener = Literal["auto", "router", "serve"]
LIST_VARIABLES = ("served_model_names", "api_key", "cors_origins")  # texts with commas


def _as_tuple(value: Any) -> Any:
    """Let one text stand for a list of one, and an empty one for none."""
    if value is None or value == "":
        return ()
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Labels = Mapping[str, str]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class RouterSettings(_Frozen):
    """The HTTP front: limits, workers for audio, time budgets."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 takes a free one")
    listener: Listener = Field(
        "auto",
        description="who binds it: router (its replicas; one machine only), "
        "serve (Ray Serve's proxies), or auto",
    )
    api_key: Texts = Field(
        (), repr=False, description="bearer keys, one of which clients must send; a text or a list"
    )
    api_key_file: Path | None = Field(
        None, description="more of them: a file with one per line, # begins a comment"
    )
    max_requests_per_key: int = Field(
        0, ge=0, description="requests of one key at once, per router; above it 429; 0: no limit"
    )
    cors_origins: Texts = Field(
        (), description="web origins whose pages may call the API, or '*'; empty: none"
    )
    replicas: int = Field(1, ge=1, description="router replicas")
    cpus: float = Field(0.0, ge=0, description="of its node, that each replica claims from Ray")
    node_labels: Labels = Field(
        {}, description="Ray's labels of the nodes to run on: LABEL: VALUE; empty: any node"
    )
    max_upload_bytes: int = Field(26_214_400, ge=1, description="largest upload, in bytes")
    max_audio_s: float = Field(4 * 3600.0, gt=0, description="longest audio, in seconds")
    min_audio_s: float = Field(0.1, ge=0, description="shortest audio, in seconds")
    max_pending_audio_s: float = Field(
        8 * 3600.0, gt=0, description="audio-seconds admitted at once; above it 503"
    )
    audio_workers: int = Field(2, ge=1, description="processes that decode uploads")
    audio_timeout_s: float = Field(120.0, gt=0, description="time one upload may take to decode")
    audio_memory_mb: int = Field(1024, ge=128, description="memory one audio worker may take")
    max_windows_in_flight: int = Field(8, ge=1, description="windows of one request at a time")
    min_deadline_s: float = Field(120.0, gt=0, description="least time a request gets")
    deadline_factor: float = Field(1.0, gt=0, description="seconds per second of audio")
    max_deadline_s: float = Field(600.0, gt=0, description="most time a request gets")
    max_attempts: int = Field(8, ge=1, description="tries of one window on failing workers")

    @model_validator(mode="after")
    def _limit_needs_keys(self) -> RouterSettings:
        if self.max_requests_per_key and not self.api_key and not self.api_key_file:
            raise ValueError("max_requests_per_key needs api_key or api_key_file")
        return self


class PoolSettings(_Frozen):
    """How many workers a pool has."""

    replicas: int
    min_replicas: int | None
    max_replicas: int | None

    @property
    def fewest(self) -> int:
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def is_scaled(self) -> bool:
        return self.fewest < self.most

    def check_bounds(self) -> None:
        """Raises ValueError."""
        if not self.fewest <= self.replicas <= self.most:
            raise ValueError(
                f"replicas ({self.replicas}) must lie between min_replicas ({self.fewest}) and "
                f"max_replicas ({self.most})"
            )


class EncoderSettings(PoolSettings):
    """One encoder worker."""

    replicas: int = Field(1, ge=1, description="encoder workers, at first where they are scaled")
    min_replicas: int | None = Field(
        None, ge=0, description="fewest of them; 0: none while nothing comes; unset: `replicas`"
    )
    max_replicas: int | None = Field(
        None, ge=1, description="most of them, as the load wants it; unset: `replicas`"
    )
    gpus: float | None = Field(
        None, ge=0, description="of each worker, perhaps a part of one; unset: as many as there are"
    )
    node_labels: Labels = Field(
        {}, description="Ray's labels of the nodes to run on: LABEL: VALUE; empty: any node"
    )
    device: Device = Field("auto", description="auto, cpu or cuda")
    dtype: DType = Field("auto", description="auto, float32, bfloat16, float16 or int8")
    max_batch: int = Field(0, ge=0, description="windows in one encoder batch; 0: by device")
    batch_wait_ms: float = Field(5.0, ge=0, description="longest wait for a batch to fill")
    export_windows: int = Field(
        0, ge=0, description="windows the export pool holds; 0: 16, on a GPU by its free memory"
    )
    threads: int = Field(0, ge=0, description="torch threads; 0 takes every core")


class DecoderSettings(PoolSettings):
    """One decoder worker."""

    replicas: int = Field(1, ge=1, description="decoder workers, at first where they are scaled")
    min_replicas: int | None = Field(
        None, ge=0, description="fewest of them; 0: none while nothing comes; unset: `replicas`"
    )
    max_replicas: int | None = Field(
        None, ge=1, description="most of them, as the load wants it; unset: `replicas`"
    )
    gpus: float | None = Field(
        None, ge=0, description="of each worker, perhaps a part of one; unset: as many as there are"
    )
    node_labels: Labels = Field(
        {}, description="Ray's labels of the nodes to run on: LABEL: VALUE; empty: any node"
    )
    device: Device = Field("auto", description="auto, cpu or cuda")
    dtype: DType = Field("auto", description="auto, float32, bfloat16, float16 or int8")
    max_batch: int = Field(16, ge=1, description="sequences in one decode step")
    kv_windows: int = Field(
        0,
        ge=0,
        description="windows of cross-attention KV held; 0: 16, on a GPU by its free memory",
    )
    max_waiting: int = Field(256, ge=1, description="sequences that may wait for pages")
    threads: int = Field(0, ge=0, description="threads of a step; 0 takes every core")
    fetch_timeout_s: float = Field(10.0, gt=0, description="longest READ of one window's KV")
    attention: Attention = Field(
        "auto",
        description="auto (flashinfer on a GPU, compiled kernels on a CPU), flashinfer or torch",
    )
    steps_ahead: int | None = Field(
        None,
        ge=0,
        le=1,
        description="decode steps launched before the last one's results are read; "
        "unset: 1 on a GPU, 0 on a CPU",
    )


class ScalingSettings(_Frozen):
    """When pools with `min_replicas` or `max_replicas` grow and shrink."""

    target_wait_s: float = Field(
        5.0, gt=0, description="time in which encoders should be done with their queue"
    )
    upscale_delay_s: float = Field(
        1.0, ge=0, description="how long more workers must be wanted before they are started"
    )
    downscale_delay_s: float = Field(
        60.0, ge=0, description="how long fewer must be enough before some are ended"
    )
    to_zero_delay_s: float = Field(
        300.0, ge=0, description="without a request, before pools with min_replicas 0 go to sleep"
    )


class ModelSettings(_Frozen):
    """One of several models. What `encoder` and `decoder` leave out is as for all of them."""

    model: str = Field(description="'demo' (bundled), a folder, or a Hub id")
    aliases: Texts = Field((), description="further names that clients may use")
    encoder: EncoderSettings = EncoderSettings()
    decoder: DecoderSettings = DecoderSettings()


class Settings(_Frozen):
    """Everything one cluster needs."""

    model: str = Field(BUNDLED_MODEL, description="'demo' (bundled), a folder, or a Hub id")
    served_model_names: Texts = Field(
        (), description="names that clients may use; default: the model's own"
    )
    models: Mapping[str, ModelSettings] = Field(
        {}, description="several models in place of one: NAME: {model, aliases, encoder, decoder}"
    )
    placement: PlacementName = Field(
        "auto",
        description="split: a worker for each role; colocated: one process for both, on one "
        "device; auto: colocated on a single GPU without NVIDIA MPS",
    )
    transport: Transport = Field(
        "auto", description="how KV moves between workers: auto, nixl or memory"
    )
    kv_network: str = Field(
        "auto",
        description="networks that KV may take: auto (the one with the address of Ray's node, and "
        "RDMA), all, or UCX's names and subnets with commas: mlx5_0:1,eth1 or 10.1.0.0/16",
    )
    page_frames: int = Field(0, ge=0, description="encoder frames in a KV page; 0: by device")
    handoff: Handoff = Field(
        "cross_kv",
        description="what an encoder hands to a decoder: cross_kv, encoder_states (less to move, "
        "the decoder projects), or auto (by the link's bandwidth)",
    )
    kv_dtype: KVDType = Field(
        "auto",
        description="of cross-attention KV: auto (the encoder's dtype), float32, bfloat16, "
        "float16 or float8 (e4m3)",
    )
    cluster_key: str | None = Field(
        None, description="key that signs KV handles; default: made at start"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="DEBUG, INFO, WARNING or ERROR"
    )
    log_format: Literal["plain", "json"] = Field(
        "plain", description="a log line: plain, or one JSON object"
    )
    otel_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="where traces go by OTLP over HTTP, such as http://collector:4318; "
        "default: nothing is traced",
    )
    otel_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the requests traced, where clients do not say",
    )
    router: RouterSettings = RouterSettings()
    encoder: EncoderSettings = EncoderSettings()
    decoder: DecoderSettings = DecoderSettings()
    scaling: ScalingSettings = ScalingSettings()

    @model_validator(mode="after")
    def _one_or_several(self) -> Settings:
        if self.models and self.model_fields_set & {"model", "served_model_names"}:
            raise ValueError("give either model (and served_model_names) or models, not both")
        names = [name for key, one in self.models.items() for name in (key, *one.aliases)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two of the models are called {min(twice)!r}")
        for one in self.by_model().values():
            one.encoder.check_bounds()
            one.decoder.check_bounds()
        return self

    def by_model(self) -> dict[str, Settings]:
        """The settings of each model as if it were alone, by its first name; the default first."""
        if not self.models:
            names = self.served_model_names or (_default_name(self.model),)
            return {names[0]: self.model_copy(update={"served_model_names": names})}
        return {
            name: self.model_copy(
                update={
                    "model": one.model,
                    "served_model_names": (name,),
                    "models": {},
                    "encoder": _overridden(self.encoder, one.encoder),
                    "decoder": _overridden(self.decoder, one.decoder),
                }
            )
            for name, one in self.models.items()
        }

    def aliases_of(self, name: str) -> tuple[str, ...]:
        """Further names of the model called `name`."""
        return self.models[name].aliases if name in self.models else ()


RoleSettings = TypeVar("RoleSettings", EncoderSettings, DecoderSettings)


def _overridden(usual: RoleSettings, own: RoleSettings) -> RoleSettings:
    return usual.model_copy(update=own.model_dump(exclude_unset=True))


def _default_name(model: str) -> str:
    """What a model is called when nobody named it: its Hub id, or its folder's name."""
    path = Path(model)
    return path.name if path.is_absolute() else model


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
        _merge(merged, _read_yaml(file))
    _merge(merged, _from_environ(os.environ if environ is None else environ))
    _merge(merged, _without_none(flags or {}))
    return checked(merged)


def checked(fields: Mapping[str, Any]) -> Settings:
    """Settings from plain fields.

    Raises:
        ConfigurationError: names the field, what came and what is allowed.
    """
    try:
        return Settings.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(_explain(error)) from error


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read settings file {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"settings file {file} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"settings file {file} must hold a mapping of fields")
    return content


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
        got = "" if isinstance(came, Mapping | BaseModel) else f" (got {came!r})"
        lines.append(f"{where}: {item['msg']}{got}" if where else f"{item['msg']}{got}")
    return "settings do not fit: " + "; ".join(lines)
