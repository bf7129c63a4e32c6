"""Routers behind Ray Serve's proxy, as on a cluster of several machines, do what they do alone."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from cluster.demo.samples import sample_path, sample_text
from tests.e2e.conftest import Server, serving, wait_until

URL = "/v1/audio/transcriptions"
FORM = {"model": "whisper-1", "language": "en"}


@pytest.fixture(scope="module", params=["1", "0"], ids=["throughput-optimised", "default"])
def proxied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    env = {"SPLITSCRIBE_ROUTER__LISTENER": "serve", "RAY_SERVE_THROUGHPUT_OPTIMIZED": request.param}
    with serving(tmp_path_factory.mktemp("cwd"), env=env) as running:
        yield running


@pytest.mark.slow
def test_an_answer_comes_through_with_one_request_id(proxied: Server) -> None:
    answer = httpx.post(
        proxied.url + URL,
        data=FORM,
        files={"file": ("a.flac", sample_path("short").read_bytes())},
        headers={"x-request-id": "mine"},
        timeout=60,
    )
    assert answer.json()["text"] == sample_text("short")
    assert answer.headers.get_list("x-request-id") == ["mine"]


@pytest.mark.slow
def test_an_upload_above_the_size_of_a_message_arrives(proxied: Server) -> None:
    """gRPC's own limit is 4 MiB."""
    answer = httpx.post(
        proxied.url + URL, data=FORM, files={"file": ("a.flac", bytes(10_000_000))}, timeout=60
    )
    assert answer.status_code == 400
    assert "file format" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_stream_says_what_the_whole_answer_says(proxied: Server) -> None:
    client = proxied.client()
    whole = client.audio.transcriptions.create(model="whisper-1", file=sample_path("medium"))
    events = list(
        client.audio.transcriptions.create(
            model="whisper-1", file=sample_path("medium"), stream=True
        )
    )
    assert events[-1].text == whole.text


@pytest.mark.slow
def test_leaving_ends_the_work(proxied: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            proxied.url + URL,
            data=FORM | {"beam_size": "5"},
            files={"file": ("a.flac", sample_path("long").read_bytes())},
            timeout=httpx.Timeout(60, read=0.5),
        )
    wait_until(proxied.is_idle, 60, "every page free")
