"""`splitscribe pull` from a hub, which a server on this machine plays."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.e2e.test_cli import splitscribe
from tests.support.checkpoints import cached_checkpoint
from tests.support.http_host import Answer, Came, Host, http_host

REPO, COMMIT = "somebody/whisper-micro", "0123456789abcdef0123456789abcdef01234567"


def hub(came: Came, host: Host) -> Answer:
    folder = cached_checkpoint("micro")
    path = came.path.partition("?")[0]
    file = folder / path.rpartition("/")[2]
    if path.startswith(f"/api/models/{REPO}/revision/"):
        return Answer(body=json.dumps({"id": REPO, "sha": COMMIT}).encode())
    if path.startswith(f"/api/models/{REPO}/tree/"):
        files = [one for one in folder.iterdir() if one.is_file()]
        told = [
            {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": "0"}
            for one in files
        ]
        return Answer(body=json.dumps(told).encode())
    if path.startswith(f"/{REPO}/resolve/{COMMIT}/") and file.is_file():
        body = file.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
        return Answer(body=body, headers=headers)
    return Answer(404, headers={"X-Error-Code": "RepoNotFound"})


@pytest.mark.slow
def test_what_was_pulled_is_there_without_a_network(tmp_path: Path) -> None:
    offline = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    none = splitscribe("pull", REPO, cwd=tmp_path, env=offline)
    assert none.returncode == 1
    assert "HF_HUB_OFFLINE is set; download it where there is a network" in none.stderr

    with http_host(hub) as host:
        there = offline | {"HF_ENDPOINT": host.url, "HF_HUB_OFFLINE": "0"}
        pulled = splitscribe("pull", REPO, cwd=tmp_path, env=there)
        assert pulled.returncode == 0, pulled.stderr
        lost = splitscribe("pull", "somebody/else", cwd=tmp_path, env=there)
    assert f"{REPO} is in {tmp_path / 'cache'}" in pulled.stdout
    assert "Fetching" in pulled.stderr  # how far it is
    assert lost.returncode == 1
    assert "somebody/else is neither a local folder nor a repository" in lost.stderr
    again = splitscribe("pull", REPO, cwd=tmp_path, env=offline)
    assert (again.returncode, again.stdout) == (0, pulled.stdout)
