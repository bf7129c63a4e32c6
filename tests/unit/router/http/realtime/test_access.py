"""Who may open a realtime session: keys, origins, limits of their number, client secrets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.common.settings import LiveSettings
from tests.support.live.realtime_door import (
    ANSWER_S,
    Door,
    opened,
    refused_upgrade,
    until,
)
from tests.support.router_fakes import make_settings


def bearer(key: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {key}"}}


def offered(key: str) -> dict[str, Any]:
    return {"subprotocols": ["realtime", f"openai-insecure-api-key.{key}"]}


@pytest.mark.parametrize("way", [bearer, offered])
async def test_keys_come_by_header_or_by_sub_protocol(
    way: Callable[[str], dict[str, Any]],
) -> None:
    async with opened(make_settings(api_key=("sesame",))) as door:
        async with door.connect(**way("sesame")) as socket:
            await until(socket, "session.created")
            assert socket.subprotocol == ("realtime" if way is offered else None)
        status, error = await refused_upgrade(door, **way("wrong"))
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert (await refused_upgrade(door))[0] == 401
        assert not door.app.state.realtime.sessions


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


async def test_foreign_pages_are_refused_where_no_key_says_who_they_are() -> None:
    async with opened(make_settings(cors_origins=("https://app.example",))) as door:
        status, error = await refused_upgrade(door, origin="https://evil.example")
        assert (status, error["code"]) == (403, "origin_not_allowed")
        for origin in ("https://app.example", f"http://127.0.0.1:{door.port}"):
            async with door.connect(origin=origin) as socket:
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


SECRET_PATHS = ("client_secrets", "transcription_sessions")


@pytest.mark.parametrize("path", SECRET_PATHS)
async def test_the_key_is_asked_for_before_a_byte_of_the_body(path: str) -> None:
    """Of 60 MB that are announced and never come, the refusal needs none."""
    async with opened(make_settings(api_key=("sesame",))) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(
            f"POST /v1/realtime/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: 60000000\r\n\r\n".encode()
        )
        async with asyncio.timeout(ANSWER_S):
            assert (await reader.readline()).split()[1] == b"401"
        writer.close()


@pytest.mark.parametrize("path", SECRET_PATHS)
async def test_a_body_of_more_than_64_kb_makes_no_secret(door: Door, path: str) -> None:
    json_type = {"Content-Type": "application/json"}
    junk = b"[" + 40_000 * b"[]," + b"[]]"
    answer = await door.post(path, content=junk, headers=json_type)
    assert (answer.status_code, "65536" in answer.json()["error"]["message"]) == (413, True)
    answer = await door.post(path, content=junk[:60_000], headers=json_type)
    assert answer.status_code == 400
    answer = await door.post(path, content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400, "a page of another site can send this without asking"


async def test_the_beta_makes_secrets_in_its_own_shape(door: Door) -> None:
    body = {"input_audio_format": "g711_alaw", "client_secret": {"expires_at": {"seconds": 20}}}
    made = (await door.post("transcription_sessions", body)).json()
    assert made["input_audio_format"] == "g711_alaw"
    async with door.connect(**bearer(made["client_secret"]["value"])) as socket:
        (created,) = await until(socket, "session.created")
        assert created["session"]["audio"]["input"]["format"] == {"type": "audio/pcma"}
