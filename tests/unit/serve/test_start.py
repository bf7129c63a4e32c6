"""The address that a start is to listen on, and whether the server answers there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.cli import check
from cluster.cli.operate.dashboard import reach
from cluster.common.errors import ConfigurationError
from cluster.common.settings import RouterSettings, Settings
from cluster.serve.replicas import workers
from cluster.serve.start.launch import _client_host
from cluster.serve.start.readiness import health_line
from cluster.serve.start.resolve import resolve_settings
from tests.support.http_host import Answer, http_host


def at(host: str, port: int) -> Settings:
    return Settings(router=RouterSettings(host=host, port=port))


@contextmanager
def answering(body: bytes = b'{"pools": {}}') -> Iterator[str]:
    with http_host(lambda *_: Answer(body=body)) as host:
        yield host.url


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_addresses_of_both_kinds_can_be_listened_on(host: str) -> None:
    try:
        port = resolve_settings(at(host, 0)).router.port
    except ConfigurationError as error:
        if ":" in host and "Cannot assign" in str(error):
            pytest.skip("this machine has no IPv6")
        raise
    assert port > 0


def test_a_port_that_is_taken_is_told_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{port}: .*another --port"):
            resolve_settings(at("127.0.0.1", port))


def test_where_clients_of_this_machine_find_the_server() -> None:
    found = {host: _client_host(host) for host in ("0.0.0.0", "10.0.0.1", "::", "::1", "fd00::1")}
    assert list(found.values()) == ["127.0.0.1", "10.0.0.1", "[::1]", "[::1]", "[fd00::1]"]


def test_check_tells_where_the_roles_would_run_by_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPLITSCRIBE_PLACEMENT", "colocated")
    ((_, placement, _),) = check._placement()
    assert placement.startswith("colocated (as set")


def test_a_container_s_limit_on_cores_is_that_of_its_workers_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray has it, and so that it is put back
    assert ("cores", "1", True) in check._system()

    def started(*options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "start_replica", started)
    with pytest.raises(KeyboardInterrupt):
        workers.EncoderWorker(Settings(), "build")
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_proxies_of_the_environment_are_not_asked_for_our_own_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with answering() as url:
        assert health_line(url)[0]
        with reach(None, url) as dashboard:
            assert dashboard.serve() == {"pools": {}}


@pytest.mark.parametrize("body", [b'"ok"', b"[]", b'{"status": "ok"}', b"ok"])
def test_another_server_at_the_port_is_not_taken_for_ours(body: bytes) -> None:
    with answering(body) as url:
        assert not health_line(url)[0]
