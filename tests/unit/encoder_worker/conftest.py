"""Fixtures of the encoder worker's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.encoder_engines import Bench, MakeBench


@pytest.fixture
def checkpoint() -> Checkpoint:
    return open_checkpoint(str(cached_checkpoint()))


@pytest.fixture
def bench(checkpoint: Checkpoint) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(checkpoint, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
