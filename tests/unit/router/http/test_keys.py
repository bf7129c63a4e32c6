"""API keys: any of several opens, none is told, and each has its own share of requests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest

from cluster.common.errors import AuthenticationError
from router.http.keys import KeyFile, KeyRing
from router.http.realtime.access import ClientSecrets
from router.http.routes import create_app
from tests.support.router_fakes import (
    AUDIO,
    MODEL_FORM,
    URL,
    FakeTranscriber,
    client_of,
    error_of,
    make_registry,
    make_settings,
)
from tests.support.waiting import eventually


def test_an_owner_is_told_by_what_is_no_key_and_always_by_the_same() -> None:
    one, two = (KeyRing(("one", "two")).owner_digest(owner) for owner in (0, 1))
    assert one != two
    assert KeyRing(("three", "one")).owner_digest(1) == one, "in every router"
    assert KeyRing(()).owner_digest(None) == b""
    assert one not in (b"one", hashlib.sha256(b"one").digest())
    assert len(one) == 32


def test_a_name_stands_for_its_key() -> None:
    keys = KeyRing(("ann s3cret-one", "s3cret-two"))
    assert keys.name(keys.owner(b"s3cret-one")) == "ann"
    assert keys.owner_digest(0) == KeyRing(("s3cret-one",)).owner_digest(0)
    unnamed = keys.name(1)
    assert unnamed.startswith("key_")
    assert unnamed == KeyRing(("other", "s3cret-two")).name(1), "in every router"
    with pytest.raises(AuthenticationError):
        keys.owner(b"ann s3cret-one")


def test_a_short_key_is_warned_of_once_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    keys = KeyRing(("ann 15-characters-k", "16-characters--k"))
    keys.replace(("bob 15-characters-k",))
    assert caplog.text.count("fewer than 16 characters") == 1
    assert "API key ann" in caplog.text
    assert "-k" not in caplog.text


async def test_a_key_comes_and_goes_with_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("ann one-s3cret\nbob two-s3cret\n")
    keys = KeyFile(make_settings(api_key="zero", api_key_file=file, max_requests_per_key=1))
    secrets = ClientSecrets("k" * 32, keys.ring)
    of_bob, _ = secrets.issue(keys.ring.owner(b"two-s3cret"), {}, 600)
    assert secrets.read(of_bob).owner == 2
    replacement = tmp_path / "new"
    replacement.write_text("ann one-s3cret\neve three-s3cret\n")
    replacement.replace(file)
    with keys.ring.request_of(2):  # what bob has begun
        await keys.look()
        names = [keys.ring.name(keys.ring.owner(key)) for key in (b"one-s3cret", b"three-s3cret")]
        assert names == ["ann", "eve"]
    for gone in (lambda: keys.ring.owner(b"two-s3cret"), lambda: secrets.read(of_bob)):
        with pytest.raises(AuthenticationError):
            gone()
    for mistake in ("# nobody\n", "ann one-s3cret # of Ann\n", None):
        file.unlink() if mistake is None else file.write_text(mistake)
        await keys.look()
        await keys.look()
        assert keys.ring.owner(b"one-s3cret") == 1, "one mistake locks nobody out, nor lets one in"
    assert caplog.text.count("stay as they were") == 3, "once each"
    assert "s3cret" not in caplog.text
    file.write_text("bob two-s3cret\n")
    await keys.look()
    assert keys.ring.owner(b"two-s3cret") == 2, "a number stays its key's"
    assert len(keys.ring) == 2


async def test_a_running_server_takes_a_changed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.keys.LOOK_S", 0.01)
    file = tmp_path / "keys"
    file.write_text("one\n")
    app = create_app(make_registry(FakeTranscriber()), make_settings(api_key_file=file))
    async with app.router.lifespan_context(app), client_of(app) as client:
        headers = {"authorization": "Bearer another"}

        async def is_let_in() -> bool:
            return (await client.get("/v1/models", headers=headers)).is_success

        assert not await is_let_in()
        file.write_text("another\n")
        await eventually(is_let_in)


async def test_the_owner_goes_with_the_request() -> None:
    transcriber = FakeTranscriber()
    for keys in ((), ("one", "two")):
        app = create_app(make_registry(transcriber), make_settings(api_key=keys))
        async with client_of(app) as client:
            for key in keys or ("any",):
                headers = {"authorization": f"Bearer {key}"}
                files = {"file": ("a", AUDIO)}
                await client.post(URL, data=MODEL_FORM, files=files, headers=headers)
    owners = [context.owner for context in transcriber.contexts]
    ring = KeyRing(("one", "two"))
    assert owners == [b"", ring.owner_digest(0), ring.owner_digest(1)]
    clients = [context.client for context in transcriber.contexts]
    assert clients == [b"127.0.0.1", *owners[1:]], "without keys an address shares with others"


@pytest.mark.parametrize("sent", [None, b"", b"on", b"one ", b"onetwo", b"\xff"])
def test_nothing_else_opens(sent: bytes | None) -> None:
    with pytest.raises(AuthenticationError):
        KeyRing(("one", "two")).owner(sent)


async def test_a_key_with_all_its_requests_running_is_told_429_and_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transcriber = FakeTranscriber()
    transcriber.hold = True
    settings = make_settings(
        api_key=("secret-one", "secret-two"),
        max_requests_per_key=1,
        max_requests_per_minute=2,  # the refused one does not count
    )

    def form(key: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"}
        return {"data": MODEL_FORM, "files": {"file": ("a", AUDIO)}, "headers": headers}

    app = create_app(make_registry(transcriber), settings)
    with caplog.at_level(logging.DEBUG):
        async with client_of(app) as client:
            first = asyncio.create_task(client.post(URL, **form("secret-one")))
            assert await asyncio.to_thread(transcriber.started.wait, 20.0)
            transcriber.hold = False
            answer = await client.post(URL, **form("secret-one"))
            assert (await client.post(URL, **form("secret-two"))).status_code == 200
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert (await client.post(URL, **form("secret-one"))).status_code == 200
    error = error_of(answer)
    assert (answer.status_code, error["type"]) == (429, "requests")
    assert error["code"] == "rate_limit_exceeded"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"
    assert "secret" not in caplog.text
    assert "secret" not in repr(settings)
