"""Frozen settings, one model for each role, composed into `Settings`.

"auto" is resolved once, into a new object, by the role that knows its hardware. Import the names of
`roles` and `router` from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, model_validator

from cluster.common.settings.roles import (
    Attention,
    BatchSettings,
    DecoderSettings,
    Device,
    DType,
    EncoderSettings,
    FrozenModel,
    Handoff,
    KVDType,
    Listener,
    LivePolicy,
    LogLevel,
    PlacementName,
    RayDashboard,
    SpeakerSettings,
    Texts,
    Transport,
)
from cluster.common.settings.router import LiveSettings, RouterSettings

BUNDLED_MODEL = "demo"
BUNDLED_SPEAKERS = Path(__file__).resolve().parents[2] / "demo" / "speakers.onnx"
SPEAKER_THRESHOLD = 0.15  # of `SpeakerSettings`; measured for the bundled network alone
BUNDLED_MODEL_IS = "a toy that knows 553 English words in synthetic voices"


class ModelSettings(FrozenModel):
    """One of several models. Settings that it leaves out are those of all models."""

    model: str = Field(description="'demo' (bundled), a folder, or a Hub id")
    aliases: Texts = Field((), description="more names that clients may use")
    live_policy: LivePolicy | None = Field(
        None, description="as router.live.policy, for this model; unset: as for all of them"
    )
    kv_dtype: KVDType | None = Field(
        None, description="as kv_dtype, for this model; unset: as for all of them"
    )
    encoder: EncoderSettings = EncoderSettings()
    decoder: DecoderSettings = DecoderSettings()


class ScalingSettings(FrozenModel):
    """When pools with `min_replicas` or `max_replicas` grow and shrink."""

    target_wait_s: float = Field(
        5.0, gt=0, description="time in seconds in which encoders should finish their queue"
    )
    upscale_delay_s: float = Field(
        1.0,
        ge=0,
        description="how long more workers must be needed before they are started, in seconds",
    )
    downscale_delay_s: float = Field(
        60.0,
        ge=0,
        description="how long fewer workers must suffice before some are ended, in seconds",
    )
    to_zero_delay_s: float = Field(
        300.0,
        ge=0,
        description="time without a request after which pools with min_replicas 0 end all workers, "
        "in seconds",
    )
    for_bulk: bool = Field(
        False,
        description="add workers for batches and archives too, which otherwise use idle ones only",
    )


class Settings(FrozenModel):
    """Everything one cluster needs."""

    model: str = Field(BUNDLED_MODEL, description="'demo' (bundled), a folder, or a Hub id")
    served_model_names: Texts = Field(
        (), description="names that clients may use; default: the model's own"
    )
    models: Mapping[str, ModelSettings] = Field(
        {},
        description="several models in place of one: NAME: {model, aliases, live_policy, kv_dtype, "
        "encoder, decoder}",
    )
    placement: PlacementName = Field(
        "auto",
        description="split: a worker for each role; colocated: one process for both, on one "
        "device; auto: colocated on a single GPU",
    )
    transport: Transport = Field(
        "auto", description="how KV moves between workers: auto, nixl or memory"
    )
    page_frames: int = Field(
        0,
        ge=0,
        description="encoder frames in a KV page; 0: by device; with 1500 on a GPU a trimmed "
        "window takes the memory of a whole one",
    )
    handoff: Handoff = Field(
        "cross_kv",
        description="what an encoder hands to a decoder: cross_kv, or encoder_states (a fraction "
        "of the bytes, from which the decoder computes the KV: for GPUs without NVLink)",
    )
    kv_dtype: KVDType = Field(
        "auto",
        description="number type of cross-attention KV: auto (float8 where both roles have dtype "
        "int8, else the encoder's), float32, bfloat16, float16 or float8 (e4m3)",
    )
    cluster_key: str | None = Field(
        None,
        repr=False,
        min_length=32,
        description="key that signs KV handles and client secrets, of 32 characters or more; "
        "default: a random one, made at the start",
    )
    log_level: LogLevel = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["plain", "json"] = Field(
        "plain", description="a log line: plain, or one JSON object"
    )
    otel_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="where traces go by OTLP over HTTP, such as http://collector:4318; default: "
        "nothing is traced",
    )
    otel_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests to trace, from 0 to 1, where the client does not decide it",
    )
    ray_dashboard: RayDashboard = Field(
        "none",
        description="parts of Ray's dashboard where splitscribe serve starts Ray: none, serve "
        "(nodes, actors, logs, Serve), or all (also jobs, events, profiles, Grafana, the file that "
        "Prometheus finds its targets by, Ray's own autoscaler)",
    )
    router: RouterSettings = RouterSettings()
    batches: BatchSettings = BatchSettings()
    speakers: SpeakerSettings = SpeakerSettings()
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
        """Settings of each model as if it were alone, by its first name; the default is first."""
        if not self.models:
            names = self.served_model_names or (_default_name(self.model),)
            return {names[0]: self.model_copy(update={"served_model_names": names})}
        return {
            name: self.model_copy(
                update={
                    "model": one.model,
                    "served_model_names": (name,),
                    "models": {},
                    "kv_dtype": one.kv_dtype or self.kv_dtype,
                    "router": _with_live_policy(self.router, one.live_policy),
                    "encoder": _overridden(self.encoder, one.encoder),
                    "decoder": _overridden(self.decoder, one.decoder),
                }
            )
            for name, one in self.models.items()
        }

    def speaker_network(self) -> SpeakerSettings:
        """`speakers` with the path of the bundled network filled in, and with a threshold."""
        model, threshold = self.speakers.model, self.speakers.threshold
        if model is None and not self.models and self.model == BUNDLED_MODEL:
            model = BUNDLED_MODEL
        if model == BUNDLED_MODEL:
            model = str(BUNDLED_SPEAKERS)
        found = {"model": model, "threshold": threshold or SPEAKER_THRESHOLD}
        return self.speakers.model_copy(update=found)

    def aliases_of(self, name: str) -> tuple[str, ...]:
        return self.models[name].aliases if name in self.models else ()


_Role = TypeVar("_Role", EncoderSettings, DecoderSettings)


def _overridden(usual: _Role, own: _Role) -> _Role:
    return usual.model_copy(update=own.model_dump(exclude_unset=True))


def _with_live_policy(router: RouterSettings, policy: LivePolicy | None) -> RouterSettings:
    if policy is None:
        return router
    return router.model_copy(update={"live": router.live.model_copy(update={"policy": policy})})


def _default_name(model: str) -> str:
    path = Path(model)
    return path.name if path.is_absolute() else model
