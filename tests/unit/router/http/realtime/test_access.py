"""Who may open a realtime session: keys, limits of their number, client secrets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.common.settings import LiveSettings
from router.http.keys import KeyRing
from router.http.realtime.access import ClientSecrets
from tests.support.live.realtime_door import Door, opened, refused_upgrade, until
from tests.support.router_fakes import make_settings


def bearer(key: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {key}"}}


def offered(key: str) -> dict[str, Any]:
    return {"subprotocols": ["realtime", f"openai-insecure-api-key.{key}"]}


@pytest.mark.parametrize("way", [bearer, offered])
async def test_keys_come_by_header_or_by_sub_protocol(
    way: Callable[[str], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(make_settings(api_key=("sesame",))) as door:
        async with door.connect(**way("sesame")) as socket:
            await until(socket, "session.created")
            assert socket.subprotocol == ("realtime" if way is offered else None)
        status, error = await refused_upgrade(door, **way("wrong"))
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert (await refused_upgrade(door))[0] == 401
        assert not door.app.state.realtime.sessions
    errors = [record.name for record in caplog.records if record.levelname == "ERROR"]
    own = [name for name in errors if not name.startswith("opentelemetry.")]  # of earlier tests
    assert not own, "whoever has no key could fill the log"


async def test_unknown_models_and_intents_are_refused_before_the_upgrade(door: Door) -> None:
    status, error = await refused_upgrade(door, "?model=whisper-99")
    assert (status, error["code"]) == (404, "model_not_found")
    assert (await refused_upgrade(door, "?intent=conversation"))[0] == 400
    door.engine.is_full = True
    assert (await refused_upgrade(door))[0] == 503
    async with httpx.AsyncClient() as client:
        answer = await client.get(door.url("").replace("ws:", "http:"))
    assert answer.status_code == 426
    assert not door.app.state.realtime.sessions


async def test_too_many_sessions_get_a_429_before_the_upgrade() -> None:
    live = LiveSettings(max_sessions=2, max_sessions_per_key=1)
    async with opened(make_settings(api_key=("one", "two", "three"), live=live)) as door:
        async with door.connect(**bearer("one")):
            status, error = await refused_upgrade(door, **bearer("one"))
            assert (status, error["type"]) == (429, "requests")
            async with door.connect(**bearer("two")):
                assert (await refused_upgrade(door, **bearer("three")))[0] == 429
        await door.none_left()
        async with door.connect(**bearer("three")) as socket:
            await until(socket, "session.created")


async def test_a_client_secret_opens_sessions_as_it_was_made_on_any_router() -> None:
    settings = make_settings(api_key=("sesame",), live=LiveSettings(max_sessions_per_key=1))
    session = {
        "type": "transcription",
        "audio": {"input": {"transcription": {"language": "de"}, "turn_detection": None}},
    }
    key = {"Authorization": "Bearer sesame"}
    async with (
        opened(settings, cluster_key="k") as door,
        opened(settings, cluster_key="k") as other,
    ):
        assert (await door.post("client_secrets")).status_code == 401
        made = (await door.post("client_secrets", {"session": session}, headers=key)).json()
        assert made["value"].startswith("ek_")
        assert 590 < made["expires_at"] - time.time() <= 600
        assert made["session"]["audio"]["input"]["turn_detection"] is None
        async with other.connect(**offered(made["value"])) as socket:
            (created,) = await until(socket, "session.created")
            assert created["session"]["audio"]["input"]["transcription"]["language"] == "de"
            assert other.engine.sessions[0].config.language == "de"
            assert (await refused_upgrade(other, **bearer("sesame")))[0] == 429, (
                "it counts as the key"
            )
        secret = {"Authorization": f"Bearer {made['value']}"}
        answer = await door.post("client_secrets", headers=secret)
        assert answer.status_code == 401, "a secret makes no secrets"
        value = made["value"]
        forged = value[:10] + ("A" if value[10] != "A" else "B") + value[11:]
        assert (await refused_upgrade(other, **bearer(forged)))[0] == 401
    async with opened(settings, cluster_key="another") as stranger:
        assert (await refused_upgrade(stranger, **bearer(made["value"])))[0] == 401


async def test_wrong_secrets_are_refused_with_the_fields_name(door: Door) -> None:
    wrong = {"audio": {"input": {"turn_detection": {"type": "magic"}}}}
    answer = await door.post("client_secrets", {"session": wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "session.audio.input.turn_detection.type"
    answer = await door.post("client_secrets", {"expires_after": {"seconds": 5}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "expires_after.seconds"
    prompt = "".join(chr(0x4E00 + i * 7 % 9999) for i in range(9000))
    answer = await door.post(
        "client_secrets", {"session": {"audio": {"input": {"transcription": {"prompt": prompt}}}}}
    )
    assert answer.json()["error"]["code"] == "string_above_max_length"


async def test_a_long_or_deep_body_makes_no_secret(door: Door) -> None:
    path = "client_secrets"
    json_type = {"Content-Type": "application/json"}
    junk = b"[" + 80_000 * b"[]," + b"[]]"
    for content in (junk, 50 * b"["):
        answer = await door.post(path, content=content, headers=json_type)
        assert answer.status_code == 400
    assert (await door.post(path, content=2 * junk, headers=json_type)).status_code == 413
    answer = await door.post(path, content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400, "a page of another site can send this without asking"


async def test_a_secret_keeps_what_is_read_and_nothing_else() -> None:
    """What nobody reads would have to be unpacked for each connection."""
    junk = {"x": "a" * 30_000}
    read = {"transcription": {"language": "de"}, "turn_detection": None}
    fields = {**read, "transcription": {"language": "de", **junk}, **junk}
    session = {"type": "transcription", "audio": {"input": fields, **junk}, "include": [], **junk}
    secrets = ClientSecrets("k", KeyRing(()))
    async with opened(cluster_key="k") as door:
        made = (await door.post("client_secrets", {"session": session})).json()
        kept = secrets.read(made["value"]).session
        assert kept == {"type": "transcription", "audio": {"input": read}, "include": []}
