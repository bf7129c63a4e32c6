"""Realtime sessions through the shipped proxies, with TLS, before a listener with a fake engine."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from cluster.cli.config import shipped_config
from cluster.common.settings import LiveSettings
from tests.support.live.fake_engine import spoken
from tests.support.live.realtime_door import RATE, Door, append, closed, opened, until
from tests.support.programs import needs
from tests.support.proxies import proxy_in_front
from tests.support.router_fakes import make_settings

CLOSED_S = 120.0
PATIENCE_S = 25  # of a proxy; pings come every 20 s

pytestmark = needs("openssl")


@asynccontextmanager
async def proxied(
    kind: str,
    door: Door,
    folder: Path,
    certificate: Path,
    changed: Mapping[str, str] | None = None,
) -> AsyncIterator[Callable[..., connect]]:
    """Yield what connects to the proxy. The loop, on which the door serves, is not blocked."""
    tls = ssl.create_default_context(cafile=str(certificate))
    with ThreadPoolExecutor(1) as threads:
        loop, backend = asyncio.get_running_loop(), f"127.0.0.1:{door.port}"
        manager = proxy_in_front(kind, backend, folder, certificate, changed)
        port = await loop.run_in_executor(threads, manager.__enter__)
        try:
            url = f"wss://localhost:{port}/v1/realtime?intent=transcription"
            yield partial(connect, url, ssl=tls)
        finally:
            await loop.run_in_executor(threads, manager.__exit__, None, None, None)


@pytest.mark.parametrize("kind", ["haproxy", "nginx"])
async def test_a_session_a_refusal_and_a_drain_come_through(
    kind: str, certificate: Path, tmp_path: Path
) -> None:
    live = LiveSettings(max_sessions=1)
    async with (
        opened(make_settings(live=live)) as door,
        proxied(kind, door, tmp_path, certificate) as proxy,
        proxy(subprotocols=["realtime"]) as socket,
    ):
        assert socket.subprotocol == "realtime"
        await append(socket, spoken(5, 0, rate=RATE) + bytes(4800))
        events = await until(socket, ".completed")
        assert events[-1]["transcript"] == "w5"

        with pytest.raises(InvalidStatus) as refused:
            async with proxy():
                pass
        answer = refused.value.response
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "5"
        assert json.loads(answer.body)["error"]["code"] == "rate_limit_exceeded"

        await append(socket, spoken(6, rate=RATE) + bytes(4800))
        await until(socket, ".delta")
        draining = asyncio.create_task(door.app.state.realtime.drain())
        await until(socket, ".completed")
        assert await closed(socket) == 1012
        await draining


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "patience"),
    [("haproxy", "timeout tunnel 70m"), ("nginx", "proxy_read_timeout 4h")],
    ids=["haproxy", "nginx"],
)
async def test_the_routers_pings_keep_a_quiet_session(
    kind: str, patience: str, certificate: Path, tmp_path: Path
) -> None:
    """With a proxy that waits little longer than from one ping to the next."""
    changed = {patience: f"{patience.rpartition(' ')[0]} {PATIENCE_S}s"}
    async with (
        opened() as door,
        proxied(kind, door, tmp_path, certificate, changed) as proxy,
        proxy(ping_interval=None) as socket,
    ):
        await until(socket, "session.created")
        await asyncio.sleep(2.5 * PATIENCE_S)
        await append(socket, spoken(5, 0, rate=RATE) + bytes(4800))
        assert (await until(socket, ".completed"))[-1]["transcript"] == "w5"


def test_a_quiet_session_outlives_the_proxies_patience() -> None:
    """HAProxy counts a WebSocket's pings; its time for tunnels must not be the shorter one."""
    found = re.search(r"timeout tunnel (\d+)m", shipped_config("tls/haproxy").path.read_text())
    assert found is not None
    assert 60 * int(found.group(1)) > LiveSettings().max_session_s
    nginx = shipped_config("tls/nginx").path.read_text()
    found = re.search(r"proxy_read_timeout (\d+)h", nginx)
    assert found is not None
    assert 3600 * int(found.group(1)) > LiveSettings().idle_timeout_s
