"""Settings of the encoder and decoder workers, and of how their pools are scaled."""

from __future__ import annotations

from pydantic import Field

from cluster.common.settings.base import (
    Attention,
    Context,
    Device,
    DType,
    EncoderDType,
    FrozenModel,
    Labels,
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
    bulk_windows: int = Field(
        1,
        ge=1,
        description="windows of archives and batches that are encoded at a time, on a CPU one "
        "more: with more these are done sooner where a larger batch is faster, and on a GPU "
        "other requests wait for longer",
    )


class DecoderSettings(PoolSettings):
    """The decoder workers."""

    dtype: DType = Field("auto", description="auto, float32, bfloat16, float16 or int8")
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
    steps_ahead: int | None = Field(
        None,
        ge=0,
        le=1,
        description="decode steps launched before the last one's results are read; "
        "unset: 1 on a GPU, 0 on a CPU",
    )
    bulk_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of rows and of pages that are taken, above which no window of archives "
        "and batches begins: the rest is for other requests",
    )


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
