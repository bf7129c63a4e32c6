"""An application over a transcriber that needs no workers, and a client in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from router.http.routes import create_app
from tests.support.router_fakes import FakeTranscriber, client_of, make_registry, make_settings


@pytest.fixture
def transcriber() -> FakeTranscriber:
    return FakeTranscriber()


@pytest.fixture
def app(transcriber: FakeTranscriber, tmp_path: Path) -> FastAPI:
    return create_app(make_registry(transcriber), make_settings(), spool_dir=tmp_path)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client
