"""The runbook's pictures, taken of a real Ray dashboard.

Anew: `RUNBOOK_IMAGES=configs/images pytest tests/e2e/operation/test_runbook.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from cluster.demo.samples import sample_path
from cluster.serve.distribution import package_root
from tests.e2e.conftest import Server, wait_until
from tests.support.browsers.page import running_browser
from tests.support.programs import needs

CONFIGS = package_root() / "configs"
MAX_BYTES = 150_000
PAGES = {  # path behind the dashboard's "#", and words that are there once it has loaded
    "serve": ("/serve", ("splitscribe", "router", "encoder", "decoder", "HEALTHY", "RUNNING")),
    "deployment": ("/serve/applications/splitscribe/decoder", ("decoder", "RUNNING", "Replicas")),
    "cluster": ("/cluster", ("ALIVE", "ServeReplica:splitscribe:decoder")),
}

# Where this machine keeps its Python is nothing for a picture.
WITHOUT_PATHS = """
    for (const link of document.querySelectorAll("a"))
        if (link.innerText.startsWith("/")) link.innerText = link.innerText.split("/").pop()
"""


def dashboard_token() -> str:
    return Path("~/.ray/auth_token").expanduser().read_text().strip()


def test_the_runbook_shows_the_pictures_that_there_are() -> None:
    book = (CONFIGS / "RUNBOOK.md").read_text()
    shown = set(re.findall(r"\]\((images/[\w-]+\.png)\)", book))
    assert shown == {f"images/{name}.png" for name in PAGES}
    for name in shown:
        content = (CONFIGS / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) < MAX_BYTES


@pytest.mark.slow
@needs("chromium")
def test_what_the_runbook_looks_at_is_in_the_dashboard(server: Server, tmp_path: Path) -> None:
    server.client().audio.transcriptions.create(model="whisper-1", file=sample_path("short"))
    wait_until(server.is_idle, 30.0, "an idle cluster")
    folder = Path(os.environ.get("RUNBOOK_IMAGES", tmp_path))
    with running_browser() as browser:
        page = browser.new_page(viewport={"width": 1600, "height": 1020})
        page.set_extra_http_headers({"Authorization": f"Bearer {dashboard_token()}"})
        for name, (path, words) in PAGES.items():
            page.goto("about:blank")
            page.goto(f"{server.dashboard()}/#{path}")
            for word in words:
                expect(page.locator("body")).to_contain_text(word, timeout=60_000)
            page.evaluate(WITHOUT_PATHS)
            page.wait_for_timeout(1_000)  # for what fades in
            content = page.screenshot(path=folder / f"{name}.png")
            assert 5_000 < len(content) < MAX_BYTES
