"""What `splitscribe batch` is asked for: `command` makes it of flags, `run` does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.archives.archive import Archive

NO_CLUSTER = "none"


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What a command line asks for. address: None looks for one, NO_CLUSTER starts one."""

    inputs: tuple[str, ...]
    archive: Archive
    model: str
    address: str | None
    config: Path | None
    dry_run: bool
