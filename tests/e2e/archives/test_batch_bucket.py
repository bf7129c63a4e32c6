"""`splitscribe batch` from bucket to bucket, by pyarrow, with a store that plays S3."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.archives.outputs import hash_of
from cluster.archives.places import Place
from cluster.serve.start.readiness import answers
from tests.e2e.archives.test_batch import RUN_S, finish, start
from tests.e2e.conftest import Server, serving, wait_until
from tests.support.archive_files import make_files
from tests.support.environments import Program, environment_of
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MOTO = Program("moto", ("moto[server]==5.2.5",))
N_FILES, N_BROKEN = 40, 2


@pytest.fixture
def server(kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Its workers reach a store with two buckets; so do this process and what it starts."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = [environment_of(MOTO).script("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    store = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(f"127.0.0.1:{port}"), 60, "the store")
        for bucket in ("talks", "texts"):
            httpx.put(f"{url}/{bucket}").raise_for_status()
        with serving(tmp_path) as running:
            yield running
    finally:
        store.terminate()
        store.wait(30)


def sidecars(texts: Place) -> dict[str, dict[str, Any]]:
    kept = (one for one in texts.below() if one.path.endswith(".splitscribe.json"))
    found = [json.loads(Place.of(one.name).read()) for one in kept]
    return {one["source"]["path"]: one for one in found}


def test_an_archive_goes_from_a_bucket_into_a_bucket(server: Server, tmp_path: Path) -> None:
    files = make_files(tmp_path / "talks", N_FILES, N_BROKEN)
    for file in (*files.talks, *files.broken):
        name = str(file.relative_to(files.folder)).replace("-", " ", 1)
        Place.of(f"s3://talks/2026/{name}").write_whole(file.read_bytes())
    talks, where = "s3://talks/2026", "s3://texts/2026"
    texts = Place.of(where)
    flags = ("-f", "json", "-f", "srt")
    first = start(talks, where, server, *flags)
    wait_until(lambda: sidecars(texts) or first.poll() is not None, RUN_S, "a file is kept", 0.02)
    first.send_signal(signal.SIGINT)
    finish(first, 130)
    n_first = len(sidecars(texts))
    assert n_first < N_FILES
    wait_until(server.does_nothing, 30, "no window of the archive is left")
    told = finish(start(talks, where, server, *flags), 3)
    assert f"{N_FILES - N_BROKEN} of {N_FILES} files" in told
    assert f"{n_first} done" in told or "failed before" in told
    kept = sidecars(texts)
    assert len(kept) == N_FILES
    assert sum(one["error"] is not None for one in kept.values()) == N_BROKEN
    for path, one in kept.items():
        name = path.removeprefix(f"{talks}/").rpartition(".")[0]
        for kind, hashed in one["written"].items():
            assert hash_of((texts / f"{name}.{kind}").read()) == hashed
        assert one["error"] is not None or one["written"].keys() == {"json", "srt"}
    again = finish(start(talks, where, server, *flags), 3)
    assert "0 to do" in again
    assert "0 to do" in finish(start(f"{talks}/**/*", where, server, *flags), 3)
