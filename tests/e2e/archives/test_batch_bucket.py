"""`splitscribe batch` from bucket to bucket, by pyarrow, with stores that play S3 and Google's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.archives.outputs import hash_of
from cluster.archives.places import Place
from cluster.cli.batch.run import answers
from tests.e2e.archives.test_batch import finish, interrupt_when, start
from tests.e2e.conftest import Server, serving, wait_until
from tests.support.archive_files import make_files
from tests.support.environments import Program, environment_of
from tests.support.ports import free_port
from tests.support.programs import require

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MOTO = Program("moto", ("moto[server]==5.2.5",))
GOOGLE = Program("gcp-storage-emulator", ("gcp-storage-emulator==2026.7.19",))
N_FILES, N_BROKEN = 40, 2
BUCKETS = ("talks", "texts")


@pytest.fixture(scope="module", params=["s3", "gs"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    port, opened = free_port(), s3_store if request.param == "s3" else google_store
    command, variables, created = opened(port, tmp_path_factory.mktemp("store"))
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(("127.0.0.1", port)), 60, "the store")
        for bucket in BUCKETS:
            created(bucket).raise_for_status()
        yield request.param, variables
    finally:
        server.terminate()
        server.wait(30)


Store = tuple[list[str], dict[str, str], Callable[[str], httpx.Response]]


def s3_store(port: int, folder: Path) -> Store:
    url = f"http://127.0.0.1:{port}"
    command = [environment_of(MOTO).script("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    variables = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    return command, variables, lambda bucket: httpx.put(f"{url}/{bucket}")


def google_store(port: int, folder: Path) -> Store:
    url = f"http://127.0.0.1:{port}"
    program = environment_of(GOOGLE).script("gcp-storage-emulator")
    command = [program, "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
    account = folder / "account.json"
    account.write_text(json.dumps(service_account(folder / "key.pem")))
    variables = {
        "CLOUD_STORAGE_EMULATOR_ENDPOINT": url,
        "GOOGLE_APPLICATION_CREDENTIALS": str(account),
    }
    return command, variables, lambda bucket: httpx.post(f"{url}/b", json={"name": bucket})


def service_account(key: Path) -> dict[str, str]:
    options = ("-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(key))
    subprocess.run((require("openssl"), "genpkey", *options), check=True, capture_output=True)
    return {
        "type": "service_account",
        "project_id": "project",
        "private_key_id": "1",
        "private_key": key.read_text(),
        "client_email": "archive@project.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": "http://127.0.0.1:9/token",
    }


@pytest.fixture
def server(
    kernels: None,
    store: tuple[str, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Server]:
    for name, value in store[1].items():
        monkeypatch.setenv(name, value)
    with serving(tmp_path) as running:
        yield running


def sidecars(texts: Place) -> dict[str, dict[str, Any]]:
    names = [texts.at(one.path).name for one in texts.below()]
    found = [json.loads(Place.of(n).read()) for n in names if n.endswith(".splitscribe.json")]
    return {one["source"]["path"]: one for one in found}


def test_an_archive_goes_from_a_bucket_into_a_bucket(
    server: Server, store: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    scheme, _ = store
    files = make_files(tmp_path / "talks", N_FILES, N_BROKEN)
    for file in (*files.talks, *files.broken):
        name = str(file.relative_to(files.folder)).replace("-", " ", 1)
        Place.of(f"{scheme}://talks/2026/{name}").write_whole(file.read_bytes())
    talks, where = f"{scheme}://talks/2026", f"{scheme}://texts/2026"
    texts = Place.of(where)
    flags = ("-f", "json", "-f", "srt")
    first = start(talks, where, server, *flags)
    interrupt_when(first, lambda: bool(sidecars(texts)))
    n_first = len(sidecars(texts))
    told = finish(start(talks, where, server, *flags), 3)
    assert f"{N_FILES - N_BROKEN} of {N_FILES} files" in told
    assert f"{n_first} are done" in told or "failed before" in told
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
