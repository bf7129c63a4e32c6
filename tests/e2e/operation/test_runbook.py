"""The runbook's pictures, taken of a real Ray dashboard.

To make the shipped ones anew:
`RUNBOOK_IMAGES=configs/images pytest tests/e2e/operation/test_runbook.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cluster.demo.samples import sample_path
from cluster.serve.distribution import package_root
from tests.e2e.conftest import Server, wait_until
from tests.support.browsers.devtools import open_page
from tests.support.programs import needs, require

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
async def test_what_the_runbook_looks_at_is_in_the_dashboard(
    server: Server, tmp_path: Path
) -> None:
    server.client().audio.transcriptions.create(model="whisper-1", file=sample_path("short"))
    wait_until(server.is_idle, 30.0, "an idle cluster")
    folder = Path(os.environ.get("RUNBOOK_IMAGES", tmp_path))
    headers = {"Authorization": f"Bearer {dashboard_token()}"}
    async with open_page(require("chromium"), tmp_path / "profile", headers) as page:
        for name, (path, words) in PAGES.items():
            await page.show(f"{server.dashboard()}/#{path}", *words)
            await page.run(WITHOUT_PATHS)
            content = await page.picture()
            assert 5_000 < len(content) < MAX_BYTES
            (folder / f"{name}.png").write_bytes(content)
