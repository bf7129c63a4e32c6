"""An application over a transcriber that needs no workers, its client, and pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.planning.virtual_time import VirtualTimeLoop
from router.audio.pool import AudioPool
from router.http.routes import create_app
from tests.support.audio.audio_pools import running
from tests.support.checkpoints import cached_checkpoint
from tests.support.played_pools import PlayedPools
from tests.support.router_fakes import FakeTranscriber, client_of, make_registry, make_settings


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests of a module that says ON_VIRTUAL_TIME run on virtual time, the others on real time."""
    if getattr(item.getparent(pytest.Module).obj, "ON_VIRTUAL_TIME", False):  # type: ignore[union-attr]
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _uploads_wait_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def transcriber() -> FakeTranscriber:
    return FakeTranscriber()


@pytest.fixture
def app(transcriber: FakeTranscriber) -> FastAPI:
    return create_app(make_registry(transcriber), make_settings())


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
def pools() -> PlayedPools:
    return PlayedPools(
        WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint("micro"))))
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[AudioPool]:
    """One audio worker for all tests of a module that leave it as it was."""
    async with running() as pool:
        yield pool
