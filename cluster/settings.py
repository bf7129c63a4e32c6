"""Frozen settings, one model per role, composed into `Settings`.

"auto" is resolved once, by the role that knows its hardware, into a new object. Where values come
from is in `cluster.settings_sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

BUNDLED_MODEL = "demo"

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
EncoderDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "float8"]
Handoff = Literal["cross_kv", "encoder_states", "auto"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "float8"]
Transport = Literal["auto", "nixl", "memory"]
PlacementName = Literal["auto", "split", "colocated"]
Attention = Literal["auto", "flashinfer", "torch"]
Listener = Literal["auto", "router", "serve"]
Context = Literal["auto", "full", "trimmed"]
LivePolicy = Literal["auto", "attention_peak", "local_agreement"]
Kernels = Literal["wait", "background"]
RayDashboard = Literal["none", "serve", "all"]
Page = Literal["auto", "on", "off"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


def _as_tuple(value: Any) -> Any:
    """Let one text stand for a list of one, and an empty one for none."""
    if value is None or value == "":
        return ()
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Labels = Mapping[str, str]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class LiveSettings(_Frozen):
    """Realtime sessions: how many, how long, how much audio may wait, and how words are told."""

    max_sessions: int = Field(
        256, ge=0, description="at once, per router; above it 429; 0: no realtime sessions"
    )
    max_sessions_per_key: int = Field(
        0, ge=0, description="of one API key at once, per router; above it 429; 0: no limit"
    )
    max_session_s: float = Field(
        3600.0, gt=0, description="longest session; a warning comes 30 s before its end"
    )
    idle_timeout_s: float = Field(
        600.0, gt=0, description="time without an event of the client after which it is closed"
    )
    max_event_bytes: int = Field(
        15_728_640, ge=1024, description="largest event of a client, in bytes"
    )
    max_unsent_s: float = Field(
        300.0, gt=0, description="seconds of audio of a session that may wait for its transcript"
    )
    policy: LivePolicy = Field(
        "auto",
        description="which words are certain: attention_peak (those that attention is past), "
        "local_agreement (those that two updates agree on; slower), or auto (the first, but for "
        "checkpoints whose decoder has less than half as many layers as their encoder)",
    )
    min_hop_s: float = Field(
        0.5, ge=0.1, le=30, description="seconds between two updates of a session, at least"
    )
    max_hop_s: float = Field(
        3.0,
        ge=0.1,
        le=30,
        description="the same at most; where the workers need more, new sessions get a 503",
    )

    @model_validator(mode="after")
    def _hops_in_order(self) -> LiveSettings:
        if self.min_hop_s > self.max_hop_s:
            raise ValueError(
                f"live.min_hop_s ({self.min_hop_s}) must not exceed "
                f"live.max_hop_s ({self.max_hop_s})"
            )
        return self


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
    asr_webservice: bool = Field(
        False,
        description="also answer /asr and /detect-language, as whisper-asr-webservice does",
    )
    page: Page = Field(
        "auto",
        description="the page at GET / to try the server on: on, off, or auto (on without API "
        "keys); with keys and on, its files are public and it asks for a key",
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
    audio_workers: int = Field(
        2,
        ge=1,
        description="processes that decode uploads; all but the first start when more uploads are "
        "there than processes",
    )
    audio_timeout_s: float = Field(120.0, gt=0, description="time one upload may take to decode")
    audio_memory_mb: int = Field(1024, ge=128, description="memory one audio worker may take")
    max_windows_in_flight: int = Field(8, ge=1, description="windows of one request at a time")
    min_deadline_s: float = Field(120.0, gt=0, description="least time a request gets")
    deadline_factor: float = Field(1.0, gt=0, description="seconds per second of audio")
    max_deadline_s: float = Field(600.0, gt=0, description="most time a request gets")
    max_attempts: int = Field(8, ge=1, description="tries of one window on failing workers")
    openai_aliases: bool = Field(
        True,
        description="the first model also answers to gpt-4o-transcribe, gpt-4o-mini-transcribe, "
        "gpt-transcribe, gpt-realtime-whisper and gpt-live-transcribe, by which clients choose "
        "what they do",
    )
    list_openai_aliases: bool = Field(
        False, description="GET /v1/models lists these names, and whisper-1, too"
    )
    live: LiveSettings = LiveSettings()

    @property
    def shows_page(self) -> bool:
        """Whether `GET /` is there: `auto` shows it where everyone may call the API anyway."""
        with_keys = bool(self.api_key or self.api_key_file)
        return self.page == "on" or (self.page == "auto" and not with_keys)

    @model_validator(mode="after")
    def _limit_needs_keys(self) -> RouterSettings:
        if self.live.max_sessions_per_key and not self.api_key and not self.api_key_file:
            raise ValueError("live.max_sessions_per_key needs api_key or api_key_file")
        if self.max_requests_per_key and not self.api_key and not self.api_key_file:
            raise ValueError("max_requests_per_key needs api_key or api_key_file")
        return self


class PoolSettings(_Frozen):
    """One role's workers: how many, where, on what device."""

    replicas: int = Field(1, ge=1, description="workers, at first where they are scaled")
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
    """The encoder workers."""

    dtype: EncoderDType = Field(
        "auto",
        description="auto, float32, bfloat16, float16, int8 (CPU) or float8 (GPU of 8.9 or more)",
    )
    max_batch: int = Field(0, ge=0, description="windows in one encoder batch; 0: by device")
    batch_wait_ms: float = Field(5.0, ge=0, description="longest wait for a batch to fill")
    export_windows: int = Field(
        0, ge=0, description="windows the export pool holds; 0: 16, on a GPU by its free memory"
    )
    threads: int = Field(0, ge=0, description="torch threads; 0 takes every core")
    context: Context = Field(
        "auto",
        description="encoder positions of a window: full (30 s), trimmed (its audio and some "
        "slack; what is doubted is encoded again in full), or auto (trimmed where the checkpoint's "
        "folder declares that it was tuned for it)",
    )
    context_slack: int | None = Field(
        None,
        ge=0,
        le=1500,
        description="positions of 20 ms behind the audio of a trimmed window; unset: the "
        "checkpoint's, else 128",
    )
    context_max_s: float | None = Field(
        None,
        gt=0,
        le=30,
        description="longest audio of a window that is trimmed; unset: the checkpoint's, else 8",
    )
    cache: bool = Field(
        True,
        description="keep published KV until its pages are needed, so that the same audio of the "
        "same API key is not encoded again",
    )


class DecoderSettings(PoolSettings):
    """The decoder workers."""

    dtype: DType = Field("auto", description="auto, float32, bfloat16, float16 or int8")
    max_batch: int = Field(
        0,
        ge=0,
        description="rows in one decode step; 0: 16, on a GPU up to 64, by its free memory",
    )
    kv_windows: int = Field(
        0,
        ge=0,
        description="windows of cross-attention KV held; 0: 16, on a GPU by its free memory",
    )
    max_waiting: int = Field(256, ge=1, description="sequences that may wait for pages")
    threads: int = Field(
        0,
        ge=0,
        description="threads of a step; 0: every core up to 8, half of them for more than 8 rows",
    )
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


class BatchSettings(_Frozen):
    """Files and batches (/v1/files, /v1/batches): where they are kept, and their limits."""

    folder: Path | None = Field(
        None,
        description="folder on a local disk (never on NFS) that holds files, batches and results; "
        "unset: no /v1/files and /v1/batches",
    )
    node_labels: Labels = Field(
        {}, description="Ray's labels of the node that has it: LABEL: VALUE; empty: any node"
    )
    concurrency: int = Field(
        4, ge=1, le=256, description="lines of all batches that are transcribed at once"
    )
    audio_workers: int = Field(2, ge=1, description="processes that decode their audio")
    max_lines: int = Field(50_000, ge=1, description="lines of one batch")
    max_batches_per_key: int = Field(
        100, ge=1, description="batches of one API key that have not ended; above it 429"
    )
    max_file_bytes: int = Field(
        536_870_912, ge=1, description="largest uploaded file, and largest audio of a line's URL"
    )
    quota_bytes: int = Field(
        0, ge=0, description="bytes of the files of one API key; above it 507; 0: no limit"
    )
    min_free_bytes: int = Field(
        268_435_456,
        ge=0,
        description="bytes that stay free on the disk; with less uploads get 507, batches pause",
    )
    retention_s: int = Field(
        2_592_000,
        ge=0,
        description="how long files are kept that have no expires_after, and ended batches; "
        "0: until they are deleted",
    )
    allowed_hosts: Texts = Field(
        (),
        description="hosts that lines' URLs may name: NAME, NAME:PORT, *.DOMAIN, or '*' for every "
        "public one; empty: none",
    )
    private_networks: Texts = Field(
        (),
        description="networks with private addresses that allowed hosts may have, such as "
        "10.1.0.0/16; empty: public addresses only",
    )
    fetch_timeout_s: float = Field(300.0, gt=0, description="longest download of a line's URL")
    webhook_hosts: Texts = Field(
        (), description="hosts that webhooks may go to, written as allowed_hosts; empty: none"
    )
    webhook_secret: str | None = Field(
        None,
        repr=False,
        pattern="^whsec_[A-Za-z0-9+/]{32,}={0,2}$",
        description="signs webhooks, by Standard Webhooks: whsec_ and base64 of 24 bytes or more",
    )

    @model_validator(mode="after")
    def _webhooks_are_signed(self) -> BatchSettings:
        if self.webhook_hosts and self.webhook_secret is None:
            raise ValueError("batches.webhook_hosts needs batches.webhook_secret")
        return self


class ModelSettings(_Frozen):
    """One of several models. What `encoder` and `decoder` leave out is as for all of them."""

    model: str = Field(description="'demo' (bundled), a folder, or a Hub id")
    aliases: Texts = Field((), description="further names that clients may use")
    live_policy: LivePolicy | None = Field(
        None, description="as router.live.policy, for this model; unset: as for all of them"
    )
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
    page_frames: int = Field(
        0,
        ge=0,
        description="encoder frames in a KV page; 0: by device; 1500 on a GPU: written without a "
        "scatter, but a trimmed window takes the room of a whole one",
    )
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
    log_level: LogLevel = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
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
    kernels: Kernels = Field(
        "wait",
        description="a CPU worker is ready once its kernels are compiled, or after 20 s (wait), or "
        "at once, with torch's operations until then (background); these round otherwise, so the "
        "same audio may get another timestamp",
    )
    ray_dashboard: RayDashboard = Field(
        "none",
        description="parts of Ray's dashboard where splitscribe serve starts Ray: none, serve "
        "(nodes, actors, logs, Serve), or all (also jobs, events, profiles, Grafana, the file that "
        "Prometheus finds its targets by, Ray's own autoscaler)",
    )
    router: RouterSettings = RouterSettings()
    batches: BatchSettings = BatchSettings()
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
                    "router": _with_live_policy(self.router, one.live_policy),
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


def _with_live_policy(router: RouterSettings, policy: LivePolicy | None) -> RouterSettings:
    if policy is None:
        return router
    return router.model_copy(update={"live": router.live.model_copy(update={"policy": policy})})


def _default_name(model: str) -> str:
    """What a model is called when nobody named it: its Hub id, or its folder's name."""
    path = Path(model)
    return path.name if path.is_absolute() else model
