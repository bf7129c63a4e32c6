"""Settings of workers and of batches, and the types of settings with few values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Handoff = Literal["cross_kv", "encoder_states"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "float8"]
Transport = Literal["auto", "nixl", "memory"]
PlacementName = Literal["auto", "split", "colocated"]
Attention = Literal["auto", "flashinfer", "torch"]
Listener = Literal["router", "serve"]
Context = Literal["auto", "full", "trimmed"]
LivePolicy = Literal["auto", "attention_peak", "local_agreement"]
RayDashboard = Literal["none", "serve", "all"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


def none_if_empty(value: Any) -> Any:
    """Compose files set an empty variable for one that is not set."""
    return None if value == "" else value


def as_tuple(value: Any) -> Any:
    """Take one text for a list of one, and an empty one for an empty list."""
    if value is None or value == "":
        return ()
    return (value,) if isinstance(value, str) else value


def in_words(value: Any) -> Any:
    """YAML reads a bare `on` or `off` as true or false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(in_words)]
Texts = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Labels = Mapping[str, str]


class FrozenModel(BaseModel):
    """A model whose values never change, and which refuses names that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class BatchSettings(FrozenModel):
    """Files and batches (/v1/files, /v1/batches): where they are kept, and their limits."""

    folder: Annotated[Path | None, BeforeValidator(none_if_empty)] = Field(
        None,
        description="folder on a local disk (never on NFS) that holds files, batches and results; "
        "unset: no /v1/files and /v1/batches",
    )
    node_labels: Labels = Field(
        {}, description="Ray's labels of the folder's node: LABEL: VALUE; empty: any node"
    )
    concurrency: int = Field(
        4, ge=1, le=256, description="lines of all batches that are transcribed at once"
    )
    audio_workers: int = Field(
        0,
        ge=0,
        description="processes that decode their audio; 0: half of the cores, from 2 to 8",
    )
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
        description="seconds for which ended batches, and files without expires_after, are kept; "
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
        (), description="hosts that webhooks may go to, written like allowed_hosts; empty: none"
    )
    webhook_secret: str | None = Field(
        None,
        repr=False,
        pattern="^whsec_([A-Za-z0-9+/]{4}){8,}([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        description="signs webhooks, by Standard Webhooks: whsec_ and base64 of 24 bytes or more",
    )

    @model_validator(mode="after")
    def _webhooks_are_signed(self) -> BatchSettings:
        if self.webhook_hosts and self.webhook_secret is None:
            raise ValueError("batches.webhook_hosts needs batches.webhook_secret")
        return self


class SpeakerSettings(FrozenModel):
    """The network that tells speakers apart by their voices."""

    model: str | None = Field(
        None,
        description="ONNX file of a network of speaker embeddings: 80 log-mel energies in, a "
        "vector out, as WeSpeaker's ResNet34 and 3D-Speaker's CAM++ have it; or 'demo', the "
        "bundled toy; unset: the toy where the model is 'demo', else none",
    )
    threshold: float | None = Field(
        None,
        gt=0,
        lt=2,
        description="cosine distance from which on two voices count as two speakers, if much was "
        "heard of both; unset: 0.15, which was measured only for the toy",
    )
    known_limit: int = Field(
        4, ge=1, le=16, description="known speakers that a request may name; OpenAI allows 4"
    )


class PoolSettings(FrozenModel):
    """One role's workers: how many, where, on what device."""

    replicas: int = Field(
        1, ge=1, description="number of workers; of scaled pools, the number at the start"
    )
    min_replicas: int | None = Field(
        None,
        ge=0,
        description="fewest workers; 0: none while there are no requests; unset: `replicas`",
    )
    max_replicas: int | None = Field(
        None, ge=1, description="most workers, under load; unset: `replicas`"
    )
    gpus: float | None = Field(
        None, ge=0, description="GPUs of each worker, also less than 1; unset: as many as there are"
    )
    cpus: float = Field(
        0.0,
        ge=0,
        description="CPUs of its node that each worker reserves in Ray, so that a cloud adds nodes "
        "for workers on CPUs; 0: none, and any number of them fits a node",
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
        if not self.fewest <= self.replicas <= self.most:
            raise ValueError(
                f"replicas ({self.replicas}) must lie between min_replicas ({self.fewest}) and "
                f"max_replicas ({self.most})"
            )


class EncoderSettings(PoolSettings):
    """The encoder workers."""

    dtype: DType = Field("auto", description="auto, float32, bfloat16, float16 or int8 (CPU)")
    max_batch: int = Field(0, ge=0, description="most windows in one encoder batch; 0: by device")
    batch_wait_ms: float = Field(5.0, ge=0, description="longest wait for a batch to fill, in ms")
    export_windows: int = Field(
        0,
        ge=0,
        description="windows that the export pool holds; 0: 16, on a GPU by its free memory",
    )
    threads: int = Field(0, ge=0, description="torch threads; 0: one for each core")
    context: Context = Field(
        "auto",
        description="encoder positions of a window: full (30 s), trimmed (its audio and some "
        "slack; windows with doubted text are encoded again in full), or auto (trimmed where the "
        "checkpoint's folder declares that it was tuned for it)",
    )
    context_slack: int | None = Field(
        None,
        ge=0,
        le=1500,
        description="positions of 20 ms after the audio of a trimmed window; unset: the "
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

    dtype: DType = Field("auto", description="auto, float32, bfloat16, float16 or int8 (CPU)")
    max_batch: int = Field(
        0,
        ge=0,
        description="most rows in one decode step; 0: 16, on a GPU up to 64, by its free memory",
    )
    kv_windows: int = Field(
        0,
        ge=0,
        description="windows of cross-attention KV that the pool holds; 0: 16, on a GPU by its "
        "free memory",
    )
    max_waiting: int = Field(256, ge=1, description="sequences that may wait for pages")
    threads: int = Field(
        0,
        ge=0,
        description="threads of a step; 0: every core up to 8, half of them for more than 8 rows",
    )
    fetch_timeout_s: float = Field(
        10.0, gt=0, description="longest READ of one window's KV, in seconds"
    )
    attention: Attention = Field(
        "auto",
        description="auto (flashinfer on a GPU, compiled kernels on a CPU), flashinfer or torch",
    )
