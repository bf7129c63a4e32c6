"""Downloads of lines' URLs: bounded, checked at each redirect, at the address that was checked."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import subprocess
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster.common.errors import (
    InsufficientStorageError,
    InvalidRequestError,
    PayloadTooLargeError,
)
from router.batches import outbound
from router.batches.blobs import Blobs
from router.batches.hosts import HostRules
from router.batches.outbound import Downloads
from tests.support.batches import DEADLINE_S, make_batch_settings
from tests.support.http_host import Answer, Came, Host, http_host
from tests.support.programs import needs

LOCAL = ("127.0.0.0/8",)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "BACKOFF_S", 0.0)


async def to_local(host: str, port: int) -> Sequence[str]:
    return ("10.0.0.1",) if host == "inside" else ("127.0.0.1",)


async def fetch(folder: Path, url: str, *hosts: str, **options: Any) -> bytes:
    blobs = Blobs(folder, options.pop("min_free_bytes", 0))
    rules = HostRules(hosts, LOCAL, to_local)
    settings = make_batch_settings(folder, **{"max_file_bytes": 1000, **options})
    downloads = Downloads(rules, blobs, settings)
    try:
        await downloads.fetch(url, folder / "got", "url")
    finally:
        await downloads.close()
    return (folder / "got").read_bytes()


@pytest.mark.parametrize(
    ("to", "code"),
    [
        *(("http://inside:{port}/", "url_not_allowed"), ("http://other/", "url_not_allowed")),
        *(("file:///etc/passwd", None), ("http://[", "download_failed")),
    ],
)
async def test_a_redirect_to_elsewhere_is_refused(
    tmp_path: Path, to: str, code: str | None
) -> None:
    def answer(came: Came, host: Host) -> Answer:
        return Answer(307, headers={"location": to.format(port=host.port)})

    with http_host(answer) as host:
        hosts = (f"store:{host.port}", f"inside:{host.port}")
        with pytest.raises(InvalidRequestError) as refused:
            await fetch(tmp_path, f"http://store:{host.port}/", *hosts)
        assert (refused.value.code, refused.value.param) == (code, "url")
        assert len(host.came) == 1


async def test_a_zero_byte_in_a_url_is_refused(tmp_path: Path) -> None:
    with http_host(lambda came, host: Answer(body=b"audio")) as host:
        with pytest.raises(InvalidRequestError) as refused:
            await fetch(tmp_path, f"{host.url}/\0", host.name)
        assert (refused.value.code, refused.value.param) == ("download_failed", "url")
        assert host.came == []


async def test_a_download_that_is_given_up_writes_into_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may be about to write when its time is over."""
    about_to, may_write = threading.Event(), threading.Event()

    def check_room(self: Blobs, wanted_bytes: int = 0) -> None:
        about_to.set()
        may_write.wait(DEADLINE_S)

    monkeypatch.setattr(Blobs, "check_room", check_room)
    with http_host(lambda came, host: Answer(body=b"audio")) as host:
        task = asyncio.create_task(fetch(tmp_path, f"{host.url}/", host.name))
        await asyncio.to_thread(about_to.wait, DEADLINE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    others = [tmp_path / f"other {i}" for i in range(64)]
    with ExitStack() as opened:
        for path in others:  # one of them has the descriptor that the download had
            opened.enter_context(path.open("wb"))
        may_write.set()
        await asyncio.get_running_loop().shutdown_default_executor()
    assert {path.read_bytes() for path in others} == {b""}


@pytest.mark.parametrize("packed", ["gzip", "gzip, gzip", "br", "x", "identity, gzip"])
async def test_what_is_packed_is_not_unpacked(tmp_path: Path, packed: str) -> None:
    """Two kilobytes may be a gigabyte, packed twice."""
    bomb = gzip.compress(bytes(10_000))

    def answer(came: Came, host: Host) -> Answer:
        assert came.headers["accept-encoding"] == "identity"
        return Answer(body=bomb, headers={"content-encoding": packed})

    with http_host(answer) as host, pytest.raises(InvalidRequestError, match="Encoding") as got:
        await fetch(tmp_path, f"{host.url}/", host.name)
    assert got.value.code == "download_failed"
    assert len(host.came) == 1


async def test_redirects_have_an_end(tmp_path: Path) -> None:
    with http_host(lambda came, host: Answer(302, headers={"location": "/"})) as host:
        with pytest.raises(InvalidRequestError, match="redirects"):
            await fetch(tmp_path, f"{host.url}/", host.name)
        assert len(host.came) == outbound.MAX_REDIRECTS + 1


@pytest.mark.parametrize("told", [True, False])
async def test_too_many_bytes_are_cut_off(tmp_path: Path, told: bool) -> None:
    def answer(came: Came, host: Host) -> Answer:
        return Answer(body=b"x" * 5000, headers={"connection": "close"}, tells_length=told)

    with http_host(answer) as host, pytest.raises(PayloadTooLargeError):
        await fetch(tmp_path, f"{host.url}/", host.name)


async def test_a_host_that_hangs_is_given_up(tmp_path: Path) -> None:
    def answer(came: Came, host: Host) -> Answer:
        host.released.wait(20)
        return Answer()

    with http_host(answer) as host, pytest.raises(InvalidRequestError, match="longer than") as got:
        await fetch(tmp_path, f"{host.url}/", host.name, fetch_timeout_s=0.2)
    assert got.value.code == "download_failed"


async def test_a_host_that_stumbles_is_asked_again(tmp_path: Path) -> None:
    def answer(came: Came, host: Host) -> Answer:
        return Answer(503) if len(host.came) < 3 else Answer(body=b"audio")

    with http_host(answer) as host:
        assert await fetch(tmp_path, f"{host.url}/", host.name) == b"audio"


async def test_what_is_not_there_is_not_asked_for_again(tmp_path: Path) -> None:
    with http_host(lambda came, host: Answer(404)) as host:
        with pytest.raises(InvalidRequestError, match="404"):
            await fetch(tmp_path, f"{host.url}/", host.name)
        assert len(host.came) == 1
    with pytest.raises(InvalidRequestError, match="could not be downloaded"):
        await fetch(tmp_path, f"{host.url}/", host.name)


async def test_a_full_disk_is_no_fault_of_the_line(tmp_path: Path) -> None:
    with http_host(lambda came, host: Answer(body=b"audio")) as host:  # noqa: SIM117
        with pytest.raises(InsufficientStorageError):
            await fetch(tmp_path, f"{host.url}/", host.name, min_free_bytes=2**62)


def made_certificate(folder: Path) -> tuple[Path, Path]:
    """A key, and a certificate of store.test that it has signed itself."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = (
        *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
        *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", key, "-out", certificate),
        *("-subj", "/CN=store.test", "-addext", "subjectAltName=DNS:store.test"),
    )
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


@needs("openssl")
async def test_a_certificate_has_to_be_of_the_name_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the call goes to an address."""
    key, certificate = made_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with http_host(lambda came, host: Answer(body=b"audio"), tls) as host:
        hosts = (f"store.test:{host.port}", f"other.test:{host.port}")
        assert await fetch(tmp_path, f"https://store.test:{host.port}/", *hosts) == b"audio"
        with pytest.raises(InvalidRequestError, match=r"(?i)certificate|hostname"):
            await fetch(tmp_path, f"https://other.test:{host.port}/", *hosts)


async def test_the_environments_proxy_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would call what was not checked."""
    with (
        http_host(lambda came, host: Answer(body=b"audio")) as host,
        http_host(lambda came, host: Answer(body=b"proxy")) as proxy,
    ):
        monkeypatch.setenv("http_proxy", proxy.url)
        assert await fetch(tmp_path, f"{host.url}/", host.name) == b"audio"
        assert proxy.came == []
