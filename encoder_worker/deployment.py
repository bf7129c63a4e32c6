"""The encoder's Serve replica: a thin shell around `EncoderEngine`.

It hands windows in and handles out, reports status and metrics, and on shutdown waits until
its exported pages are free. It knows Serve; the engine does not.
"""

from __future__ import annotations

import asyncio
import logging

from cluster.build import check_distribution
from cluster.errors import WorkerError
from cluster.kv.connect import make_exporter
from cluster.kv.layout_for import kv_layout
from cluster.logs import configure_logging, request_logging
from cluster.messages import EncodeReply, EncodeRequest, WorkerStatus
from cluster.metrics import ENCODER_METRICS, serve_recorder
from cluster.model.checkpoint import open_checkpoint
from cluster.replica import replica_name, report_forever
from cluster.settings import Settings
from encoder_worker.engine import EncoderEngine

logger = logging.getLogger(__name__)


class EncoderWorker:
    """Serve deployment class of the encoder pool."""

    def __init__(self, settings: Settings, build: str) -> None:
        check_distribution(build)
