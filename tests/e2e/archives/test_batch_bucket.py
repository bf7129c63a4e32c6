"""`splitscribe batch` from a bucket into a bucket, against a server that speaks S3.

The server is moto's, in an environment of its own; the client is the one that people use, pyarrow's
own, with the variables by which they name a store of theirs.
"""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest

from cluster.archives.places import Place
from tests.e2e.archives.test_batch import finish, interrupt_when, start
from tests.e2e.conftest import Server, start_server, stop_server, wait_until
from tests.support.archive_files import make_files
from tests.support.environments import Program, environment_of
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MOTO = Program("moto", ("moto[server]==5.2.5",))
N_FILES, N_BROKEN = 40, 2


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """Variables by which clients find a store with two buckets, talks and texts."""
    port = free_port()
    server = subprocess.Popen(
        [environment_of(MOTO).script("moto_server"), "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: httpx.get(url).status_code, 60, "the store")
        for bucket in ("talks", "texts"):
            httpx.put(f"{url}/{bucket}").raise_for_status()
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def server(
    kernels: None, store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """Its workers reach the store; so do this process and what it starts."""
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    running = start_server(tmp_path)
    try:
        yield running
    finally:
        status = stop_server(running)
    assert status == 0, running.output()[-4000:]


def n_kept(texts: Place) -> int:
    """Files that the journal in the bucket tells of."""
    lines = [
        Place.of(texts.name_of(info.path)).read().splitlines()
        for info in (texts / "_splitscribe/journal").below()
    ]
    return sum(map(len, lines))


def test_an_archive_goes_from_a_bucket_into_a_bucket(server: Server, tmp_path: Path) -> None:
    """Interrupted after its first objects, it goes on; a name with a space is one of the files."""
    files = make_files(tmp_path / "talks", N_FILES, N_BROKEN)
    for file in (*files.talks, *files.broken):
        name = str(file.relative_to(files.folder)).replace("-", " ", 1)
        Place.of(f"s3://talks/2026/{name}").write_whole(file.read_bytes())
    where, texts = "s3://texts/2026", Place.of("s3://texts/2026")
    flags = ("-f", "json", "-f", "srt")
    first = start("s3://talks/2026", where, server, *flags)
    interrupt_when(first, lambda: n_kept(texts) > 0)
    assert n_kept(texts) == 0, "the journal became a part"
    told = finish(start("s3://talks/2026", where, server, *flags), 3)
    assert f"{N_FILES - N_BROKEN} of {N_FILES} files" in told
    assert " are done" in told
    rows = [
        row
        for part in (texts / "transcripts").below()
        for row in pq.read_table(io.BytesIO(Place.of(texts.name_of(part.path)).read())).to_pylist()
    ]
    assert len({row["path"] for row in rows}) == len(rows) == N_FILES
    assert sum(row["error"] is not None for row in rows) == N_BROKEN
    for row in rows:
        if row["error"] is None:
            written = json.loads((texts / f"{row['output']}.json").read())
            assert written["text"] == row["text"]
    again = finish(start("s3://talks/2026", where, server, *flags), 3)
    assert "0 to do" in again
