"""Settings of files and batches."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from cluster.common.settings.base import FrozenModel, Labels, Texts


class BatchSettings(FrozenModel):
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
