"""OpenAI's Node SDK against a running cluster: `node/client.mjs` calls, these tests judge."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server
from tests.support.programs import needs

FOLDER = Path(__file__).with_name("node")
INSTALL_S = 120
CALLS_S = 120
pytestmark = needs("node", "npm")
OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENOTCACHED")


def install() -> None:
    """`npm ci`, unless what is locked is there. Skips the tests where it cannot be had."""
    locked, installed = FOLDER / "package-lock.json", FOLDER / "node_modules/.package-lock.json"
    if installed.exists() and versions(locked).items() <= versions(installed).items():
        return
    run = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    if any(code in run.stderr for code in OFFLINE):
        pytest.skip("npm cannot reach its registry")
    assert run.returncode == 0, run.stderr


def versions(lock: Path) -> dict[str, str]:
    packages = json.loads(lock.read_text())["packages"]
    return {name: package["version"] for name, package in packages.items() if name}


@pytest.fixture(scope="module")
def report(server: Server) -> dict[str, Any]:
    install()
    arguments = [f"{server.url}/v1", str(sample_path("long"))]
    run = subprocess.run(
        ["node", "client.mjs", *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=CALLS_S,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(
    ("case", "raised", "status", "param", "code"),
    [
        ("garbage", "BadRequestError", 400, None, None),
        ("garbage, streamed", "BadRequestError", 400, None, None),
        ("model", "NotFoundError", 404, None, "model_not_found"),
        ("temperature", "BadRequestError", 400, "temperature", None),
        ("in mid-stream", "APIError", None, "file", "audio_truncated"),
    ],
)
def test_failures_raise_the_sdk_s_classes(
    report: dict[str, Any],
    case: str,
    raised: str,
    status: int | None,
    param: str | None,
    code: str | None,
) -> None:
    failure = report[case]
    assert failure["isAPIError"], failure
    found = tuple(failure[name] for name in ("raised", "status", "param", "code"))
    assert found == (raised, status, param, code), failure
    assert failure["requestID"] or status is None
    assert bool(failure["before"]) == (status is None)
