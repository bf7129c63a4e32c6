"""Batches on a real cluster, by OpenAI's SDK: texts, URLs, and what survives which end."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai.types import Batch

from cluster.demo.samples import SAMPLES, sample_path
from tests.e2e.conftest import Server, serving, wait_until
from tests.support.batches import ENDPOINT, line
from tests.support.http_host import Answer, Came, Host, http_host

BATCH_S = 150.0
OWNER, ROUTER, ENCODER, DECODER = (
    f"ray::ServeReplica:splitscribe:{name}" for name in ("batches", "router", "encoder", "decoder")
)


def settings_of(folder: Path, **changes: str) -> dict[str, str]:
    own = {"folder": str(folder), "min_free_bytes": "0", **changes}
    return {f"SPLITSCRIBE_BATCHES__{name.upper()}": value for name, value in own.items()}


def processes(server: Server, mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if mark in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def upload(client: openai.OpenAI, lines: list[bytes]) -> Batch:
    file = client.files.create(file=("lines.jsonl", b"".join(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=ENDPOINT,  # type: ignore[arg-type]  # the SDK does not list audio
        completion_window="24h",
    )


def ended(
    client: openai.OpenAI, batch_id: str, within_s: float = BATCH_S, step_s: float = 0.1
) -> Batch:
    def over() -> Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "cancelled", "expired") else None

    batch: Batch = wait_until(over, within_s, "the end of the batch", step_s)
    return batch


def bodies(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    lines = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    found = {one["custom_id"]: one["response"]["body"] for one in lines}
    assert len(found) == len(lines)
    return found


def texts_of(client: openai.OpenAI) -> dict[str, str]:
    create = client.audio.transcriptions.create
    return {
        name: create(model="whisper-1", file=sample_path(name), temperature=0).text
        for name in SAMPLES
    }


@pytest.fixture(scope="module")
def store() -> Iterator[Host]:
    def answer(came: Came, host: Host) -> Answer:
        if came.method == "POST":
            return Answer()
        return Answer(body=sample_path(came.path.strip("/")).read_bytes())

    with http_host(answer) as host:
        yield host


@pytest.fixture(scope="module")
def batching(
    kernels: None, store: Host, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("batches")
    secret = "whsec_" + base64.b64encode(bytes(24)).decode()
    env = settings_of(
        folder / "kept",
        allowed_hosts=store.name,
        webhook_hosts=store.name,
        webhook_secret=secret,
        private_networks="127.0.0.0/8",
    )
    with serving(folder, env=env) as running:
        yield running


def test_a_batch_has_the_texts_of_the_endpoint(batching: Server, store: Host) -> None:
    client = batching.client(max_retries=0)
    texts = texts_of(client)
    medium = client.files.create(file=sample_path("medium"), purpose="user_data")
    short = base64.b64encode(sample_path("short").read_bytes()).decode()
    batch = upload(
        client,
        [
            line("medium", file_id=medium.id),
            line("short", url=f"data:audio/flac;base64,{short}"),
            line("long", file_url=f"{store.url}/long"),
            line("inside", url="http://169.254.169.254/latest/meta-data"),
            line("no audio", url="data:audio/wav;base64,AAAA"),
        ],
    )
    batch = ended(client, batch.id)
    assert batch.status == "completed", batch
    assert texts_in(client, batch) == texts
    errors = bodies(client, batch.error_file_id)
    assert errors["inside"]["error"]["code"] == "url_not_allowed"
    assert errors["no audio"]["error"]["type"] == "invalid_request_error"
    assert "Invalid file format" in errors["no audio"]["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/embeddings", completion_window="24h"
        )
    told = client.batches.create(
        input_file_id=batch.input_file_id,
        endpoint=ENDPOINT,  # type: ignore[arg-type]
        completion_window="24h",
        extra_body={"webhook_url": f"{store.url}/told"},
    )
    client.batches.cancel(told.id)
    assert ended(client, told.id).status == "cancelled"
    wait_until(lambda: "/told" in [came.path for came in store.came], 30, "the webhook")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_owner_a_router_and_workers_are_killed_in_the_middle(batching: Server) -> None:
    client = batching.client(max_retries=0)
    batch, texts = upload_talks(client, 45)
    for n_done, mark in ((3, OWNER), (10, ROUTER), (16, ENCODER), (22, DECODER), (30, OWNER)):
        wait_until(lambda n=n_done: done(client, batch) >= n, BATCH_S, f"{n_done} lines")
        killed = processes(batching, mark)
        assert killed
        for process in killed:
            process.kill()
    batch = ended(client, batch.id)
    counts = batch.request_counts
    assert counts is not None
    assert (batch.status, counts.completed, counts.failed) == ("completed", 45, 0)
    assert texts_in(client, batch) == texts


def upload_talks(client: openai.OpenAI, n: int) -> tuple[Batch, dict[str, str]]:
    texts = texts_of(client)
    ids = {
        name: client.files.create(file=sample_path(name), purpose="user_data").id
        for name in SAMPLES
    }
    names = {f"{i}": SAMPLES[i % 3] for i in range(n)}
    batch = upload(client, [line(key, file_id=ids[name]) for key, name in names.items()])
    return batch, {key: texts[name] for key, name in names.items()}


def texts_in(client: openai.OpenAI, batch: Batch) -> dict[str, str]:
    return {key: body["text"] for key, body in bodies(client, batch.output_file_id).items()}


def done(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return counts.completed if counts else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_is_started_again_goes_on(kernels: None, tmp_path: Path) -> None:
    env = settings_of(tmp_path / "kept")
    with serving(tmp_path, env=env) as server:
        client = server.client(max_retries=0)
        batch, texts = upload_talks(client, 24)
        files = {file.id for file in client.files.list(purpose="user_data")}
        wait_until(lambda: done(client, batch) >= 2, BATCH_S, "two lines")
    with serving(tmp_path, env=env) as server:
        client = server.client(max_retries=0)
        assert {file.id for file in client.files.list(purpose="user_data")} == files
        assert len(files) == len(SAMPLES)
        assert texts_in(client, ended(client, batch.id)) == texts
