"""An application over a pipeline that needs no workers, and a client in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from router.http.routes import create_app
from tests.support.router_fakes import FakePipeline, client_of, make_registry, make_settings


@pytest.fixture
def pipeline() -> FakePipeline:
    return FakePipeline()


@pytest.fixture
def app(pipeline: FakePipeline, tmp_path: Path) -> FastAPI:
    return create_app(make_registry(pipeline), make_settings(), spool_dir=tmp_path)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client
