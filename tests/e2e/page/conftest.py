"""A real Chromium, and the page at `/` of a real server in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.conftest import Server
from tests.e2e.http.test_node_sdk import OFFLINE
from tests.support.audio.recordings import lengthened
from tests.support.browsers.page import opened, running_browser

AXE = Path(__file__).with_name("browser")


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    spoken = tmp_path_factory.mktemp("spoken") / "short.wav"
    spoken.write_bytes(lengthened("short", 24_000))
    with running_browser(spoken) as browser:
        yield browser


@pytest.fixture(scope="package")
def axe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axe")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(AXE / name, folder)
    install = ["npm", "ci", "--no-audit", "--no-fund"]
    run = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120)
    if any(code in run.stderr for code in OFFLINE):
        pytest.skip("npm cannot reach its registry")
    assert run.returncode == 0, run.stderr
    return folder / "node_modules/axe-core/axe.min.js"


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    with opened(browser, server.url) as page:
        yield page
