"""Replicas without Serve."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.metrics import silent_recorder


@pytest.fixture
def as_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replica asks of Serve is answered here."""

    def start(role: str, settings: Any, build: str, specs: Any) -> Any:
        return f"{role}-1", silent_recorder(specs)

    for module in ("cluster.colocated", "encoder_worker.deployment", "decoder_worker.deployment"):
        monkeypatch.setattr(f"{module}.start_replica", start)
    for module in ("encoder_worker.deployment", "decoder_worker.deployment"):
        monkeypatch.setattr(f"{module}.gpu_share", lambda: 1.0)
