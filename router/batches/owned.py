"""The objects that the parts of the batch owner's process share."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.metrics import Recorder
from cluster.common.settings import BatchSettings
from router.batches.blobs import Blobs
from router.batches.store import Store
from router.batches.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class Owned:
    settings: BatchSettings
    blobs: Blobs
    store: Store
    queue: WorkQueue
    recorder: Recorder
