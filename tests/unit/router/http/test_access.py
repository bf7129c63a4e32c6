"""Who may come in: asked on every route there is, before a byte of a body; and bounds of bodies."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable, Iterator
from typing import Any, cast

import pytest
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import Match, Mount, Route, WebSocketRoute
from starlette.types import Message, Receive

from cluster.common.errors import InvalidRequestError, PayloadTooLargeError
from router.batches.service import BatchService
from router.http import access
from router.http.access import MAX_BODY_BYTES, HostNames, HostRefusedError, bounded, route_path
from router.http.batches import BatchAccess
from router.http.routes import create_app
from tests.support.live.realtime_door import opened, until
from tests.support.router_fakes import (
    MODEL_FORM,
    URL,
    FakeTranscriber,
    client_of,
    error_of,
    make_registry,
    make_settings,
    post,
)

SECRETS = "/v1/realtime/client_secrets"


def make_app(**settings: Any) -> FastAPI:
    everything = make_settings(**{"asr_webservice": True, "page": "on", **settings})
    batches = BatchAccess(cast("BatchService", None), 1000)
    return create_app(make_registry(FakeTranscriber()), everything, batches=batches)


@pytest.fixture(scope="module")
def keyless() -> FastAPI:
    return make_app()


# ---- every route


@pytest.mark.parametrize("root", ["", "/", "/a", "/ab"])
@pytest.mark.parametrize("path", ["/", "/a", "/a/", "/ab", "/a/health", "/a//page/", "/abc/a"])
def test_a_path_is_read_as_starlette_finds_its_route(root: str, path: str) -> None:
    scope = {"type": "http", "method": "GET", "path": path, "root_path": root, "headers": []}
    match, found = Route("/{seen:path}", lambda _: None).matches(scope)
    seen = "/" + found["path_params"]["seen"] if match is Match.FULL else ""
    assert seen == route_path(scope)


async def no_body() -> Message:
    return await asyncio.Future()  # never: who reads it before the key is known gives no answer


async def status_of(app: FastAPI, scope: dict[str, Any], receive: Receive = no_body) -> int:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    usual = {"query_string": b"", "headers": [], "extensions": {"websocket.http.response": {}}}
    await app({**usual, **scope}, receive, send)
    return int(sent[0]["status"])


def all_routes(routes: Iterable[Any]) -> Iterator[Any]:
    """Those of included routers too."""
    for route in routes:
        if included := getattr(route, "original_router", None):
            yield from all_routes(included.routes)
        else:
            yield route


async def test_every_route_asks_for_the_key_before_a_byte_of_the_body() -> None:
    app = make_app(api_key=["one"])
    found, public = set(), set()
    for route in all_routes(app.routes):
        path = re.sub(r"{.*?}", "x", route.path)
        kind, methods = "http", getattr(route, "methods", ("GET",))
        if isinstance(route, WebSocketRoute):
            kind = "websocket"
        elif isinstance(route, Mount):
            path += "/x.js"
        for method in methods:
            found.add((method, path))
            scope = {"type": kind, "method": method, "path": path}
            if await status_of(app, scope) != 401:
                public.add(path)
        assert getattr(route, "body_field", None) is None, "FastAPI parses without any bound"
    assert {("POST", URL), ("POST", SECRETS), ("DELETE", "/v1/files/x"), ("POST", "/asr")} <= found
    assert public == {*access.PROBES, "/", "/page/x.js"}, "whoever adds one must mean it"


async def test_what_is_no_route_asks_for_the_key_too() -> None:
    async with client_of(make_app(api_key=["one"])) as client:
        for path in ("/docs", "/metrics", "/v1", "/health/", "/page", "/health/x"):
            assert (await client.get(path)).status_code == 401


# ---- bodies


def sender(*pieces: bytes, pause_s: float = 0.0) -> Any:
    left = iter(pieces)

    async def receive() -> Message:
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": next(left), "more_body": True}

    return receive


async def many(receive: Receive, n: int = 1000) -> None:
    for _ in range(n):
        await receive()


async def test_a_body_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "STALL_S", 0.02)
    with pytest.raises(InvalidRequestError, match="stalled") as caught:
        await bounded(sender(b"x", pause_s=60.0), 100)()
    assert caught.value.code == "upload_stalled"


async def test_a_body_that_trickles_is_given_up_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "RATED_S", 0.1)
    receive = bounded(sender(*1000 * [b"x"], pause_s=0.01), 1_000_000)
    with pytest.raises(InvalidRequestError, match="bytes came in"):
        await many(receive)
    await many(bounded(sender(*20 * [bytes(200)], pause_s=0.01), 1_000_000), 20)


async def test_a_client_is_waited_for_without_end_when_its_body_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "STALL_S", 0.02)
    messages = iter(({"type": "http.request", "body": b"a"}, {"type": "http.disconnect"}))

    async def receive() -> Message:
        await asyncio.sleep(0.05 * (message := next(messages))["type"].endswith("disconnect"))
        return message

    limited = bounded(receive, 1)
    assert (await limited()).get("body") == b"a"
    assert (await limited())["type"] == "http.disconnect"


async def test_a_body_is_cut_off_at_the_byte_that_is_too_many() -> None:
    receive = bounded(sender(b"ab", b"c", b"d"), 3)
    await receive()
    await receive()
    with pytest.raises(PayloadTooLargeError, match="more than 3 bytes"):
        await receive()


async def test_what_is_no_upload_has_few_bytes_and_a_client_that_leaves_costs_nothing(
    keyless: FastAPI,
) -> None:
    async def left() -> Message:
        return {"type": "http.disconnect"}

    async with client_of(keyless) as client:
        for path in (SECRETS, "/v1/batches"):
            answer = await client.post(path, content=bytes(MAX_BODY_BYTES + 1))
            assert (answer.status_code, error_of(answer)["code"]) == (413, None)
            scope = {"type": "http", "method": "POST", "path": path}
            assert await status_of(keyless, scope, left) == 499
        answer = await post(client, bytes(MAX_BODY_BYTES // 2))
        assert answer.status_code == 200


# ---- names


OWN = ("localhost:8000", "LOCALHOST", "a.localhost", "localhost.", "127.0.0.1:8000", "192.168.1.7")
OWN += ("[::1]:8000", "[fe80::1]", "10.0.0.5:80", f"{socket.gethostname()}:8000", "")
FOREIGN = ("attacker.example:8000", "localhost.attacker.example", "127.0.0.1.nip.io", "whisper")
FOREIGN += ("[attacker.example]", "1.2.3.4.5", "notlocalhost", "evil\x1b", "xlocalhost:localhost")


def takes(host: str, *hosts: str) -> bool:
    try:
        HostNames(hosts).check(Headers({"host": host}))
    except HostRefusedError as error:
        return not ("router.hosts" in error.message and error.message.isprintable())
    return True


@pytest.mark.parametrize("host", OWN)
def test_a_server_answers_to_addresses_and_its_own_names(host: str) -> None:
    assert takes(host)


@pytest.mark.parametrize("host", FOREIGN)
def test_it_answers_to_no_other_name(host: str) -> None:
    assert not takes(host)


def test_every_name_of_a_request_counts() -> None:
    sent = [(b"host", b"localhost"), (b"host", b"attacker.example")]
    with pytest.raises(HostRefusedError):
        HostNames(()).check(Headers(raw=sent))
    HostNames(()).check(Headers())


async def test_without_keys_other_names_get_a_421_but_for_probes(keyless: FastAPI) -> None:
    """A kubelet sends the pod's address or what the probe says, HAProxy's check no name at all."""
    async with client_of(keyless) as client:
        for path in ("/v1/models", "/", "/docs", "/page/main.js", "/nothing"):
            for host, name in (("127.0.0.1", ""), ("attacker.example:8000", "attacker.example")):
                answer = await client.get(path, headers={"host": host})
                assert (answer.status_code == 421) == bool(name)
        error = error_of(await client.get("/v1/models", headers={"host": "attacker.example"}))
        assert error["code"] == "host_not_allowed"
        assert "'attacker.example'" in error["message"]
        assert answer.headers["x-should-retry"] == "false"
        answer = await client.get("/health", headers={"host": "attacker.example"})
        assert answer.status_code == 200
    foreign = [(b"host", b"attacker.example")]
    upgrade = {"type": "websocket", "path": "/v1/realtime", "headers": foreign}
    assert await status_of(keyless, upgrade) == 421


@pytest.mark.parametrize(
    ("named", "host", "is_taken"),
    [
        ("whisper", "whisper:8000", True),  # a service of docker compose or Kubernetes
        ("whisper", "whisper.prod.svc", False),
        ("*.svc.cluster.local", "whisper.prod.svc.cluster.local:80", True),
        ("*.svc.cluster.local", "svc.cluster.local", False),
        ("Speech.Example:443", "speech.example", True),  # an ingress
        ("*", "anything", True),
    ],
)
def test_a_setting_names_what_else_it_is_called(named: str, host: str, is_taken: bool) -> None:
    assert takes(host, "other", named) is is_taken
    assert takes("localhost", named)


async def test_with_keys_names_are_checked_where_some_are_set() -> None:
    headers = {"authorization": "Bearer one", "host": "whisper"}
    for hosts, status in (((), 200), (("speech.example",), 421)):
        async with client_of(make_app(api_key=["one"], hosts=hosts)) as client:
            assert (await client.get("/v1/models", headers=headers)).status_code == status


# ---- pages of other origins


FORM: dict[str, Any] = {"data": MODEL_FORM, "files": {"file": ("a.wav", b"RIFF")}}
HOSTILE = {
    "another origin": {"origin": "http://evil.example"},
    "none": {"origin": "null"},
    "no URL": {"origin": "http://["},
    "another port": {"origin": "http://localhost:8000"},
    "cross-site": {"sec-fetch-site": "cross-site"},
    "a neighbour": {"origin": "http://evil.localhost", "sec-fetch-site": "same-site"},
}


@pytest.mark.parametrize("headers", HOSTILE.values(), ids=HOSTILE.keys())
async def test_without_keys_forms_of_foreign_pages_change_nothing(
    keyless: FastAPI, headers: dict[str, str]
) -> None:
    async with client_of(keyless) as client:
        for path in (URL, "/asr", "/v1/files", "/v1/batches", SECRETS):
            answer = await client.post(path, headers=headers, **FORM)
            assert (answer.status_code, error_of(answer)["code"]) == (403, "origin_not_allowed")
        assert (await client.delete("/v1/files/x", headers=headers)).status_code == 403
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    upgrade = {"type": "websocket", "path": "/v1/realtime"}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert await status_of(keyless, {**upgrade, "headers": [(b"host", b"localhost"), *raw]}) == 403


FRIENDLY: tuple[tuple[dict[str, Any], dict[str, str]], ...] = (
    ({}, {"origin": "http://localhost", "sec-fetch-site": "same-origin"}),
    ({}, {"origin": "http://localhost"}),  # to addresses browsers send no more
    ({}, {"origin": "https://speech.example", "sec-fetch-site": "same-origin"}),  # a proxy's name
    ({"cors_origins": "https://app.example"}, {"origin": "https://app.example"}),
    ({"cors_origins": "https://app.example/"}, {"origin": "https://app.example"}),
    ({"cors_origins": "*"}, {"origin": "null", "sec-fetch-site": "cross-site"}),
    ({"api_key": "one"}, {"origin": "https://app.example", "authorization": "Bearer one"}),
)


@pytest.mark.parametrize(("settings", "headers"), FRIENDLY)
async def test_all_other_requests_are_served(
    settings: dict[str, Any], headers: dict[str, str]
) -> None:
    async with client_of(make_app(**settings)) as client:
        assert (await client.post(URL, headers=headers, **FORM)).status_code == 200


async def test_pages_of_the_server_and_of_allowed_origins_open_sessions() -> None:
    async with opened(make_settings(cors_origins=("https://app.example",))) as door:
        for origin in ("https://app.example", f"http://127.0.0.1:{door.port}"):
            async with door.connect(origin=origin) as socket:
                await until(socket, "session.created")
