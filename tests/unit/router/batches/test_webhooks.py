"""Clients' servers are told of a batch's end: signed, again where needed, on allowed hosts."""

from __future__ import annotations

import asyncio
import base64
import errno
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.common.errors import InvalidRequestError, NotFoundError
from router.batches.hosts import Destination
from router.batches.outbound import DELAYS_S
from tests.support.batches import AUDIO, HOUR_S, Hands, desk, eventually, line, make_batch_settings
from tests.support.http_host import Answer, Came, Host, http_host

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


def allowing(host: Host) -> dict[str, Any]:
    return {
        "webhook_hosts": (host.name,),
        "webhook_secret": SECRET,
        "private_networks": ("127.0.0.0/8",),
    }


async def test_openais_sdk_takes_the_event(tmp_path: Path) -> None:
    hands = Hands(wall_s=time.time())  # the SDK compares it with its own clock
    with http_host(lambda came, host: Answer()) as host:
        async with desk(tmp_path, hands=hands, **allowing(host)) as at:
            input_id = await at.upload(line("a", **AUDIO))
            batch_id = await at.create(input_id, webhook_url=f"{host.url}/hook?x=1")
            await at.ended(batch_id)
            await eventually(lambda: bool(host.came))
    [came] = host.came
    assert (came.method, came.path) == ("POST", "/hook?x=1")
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    event = client.webhooks.unwrap(came.body, came.headers)
    assert (event.type, event.data.id) == ("batch.completed", batch_id)  # type: ignore[union-attr]
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(came.body + b" ", came.headers)


async def test_a_batch_that_fails_is_told_too_and_tries_go_on(tmp_path: Path) -> None:
    """Over a restart: a host that was down gets it when it is there again."""
    hands = Hands()

    def answer(came: Came, host: Host) -> Answer:
        return Answer(200 if len(host.came) > 2 else 500)

    with http_host(answer) as host:
        async with desk(tmp_path, hands=hands, **allowing(host)) as at:
            batch_id = await at.create(await at.upload(b"{"), webhook_url=host.url)
            assert (await at.ended(batch_id)).status == "failed"
            await eventually(lambda: len(host.came) == 1)
            await eventually(lambda: not at.service._webhooks._running)
            await at.service._webhooks.deliver_due()
            assert not at.service._webhooks._running, "it is not due yet"
        for n, delay_s in enumerate(DELAYS_S[:2], start=2):
            hands.pass_s(delay_s)
            async with desk(tmp_path, hands=hands, **allowing(host)) as at:
                await eventually(lambda n=n: len(host.came) == n)
                await eventually(lambda at=at: not at.service._webhooks._running)
        hands.pass_s(24 * 3600)
        async with desk(tmp_path, hands=hands, **allowing(host)) as at:
            store = at.service._owned.store
            assert not await store.database.call(store.due_webhooks, (), 8), "it was delivered"
    ids = {came.headers["webhook-id"] for came in host.came}
    assert len(ids) == 1, "the receiver can tell that it is the same event"
    assert len({came.headers["webhook-timestamp"] for came in host.came}) == 3


@pytest.mark.parametrize("is_turned_off", [True, False])
async def test_a_batch_is_kept_for_its_webhook_unless_none_is_made(
    tmp_path: Path, is_turned_off: bool
) -> None:
    hands = Hands()
    with http_host(lambda came, host: Answer(500)) as host:
        async with desk(tmp_path, hands=hands, **allowing(host)) as at:
            batch_id = await at.create(await at.upload(b"{"), webhook_url=host.url)
            await at.ended(batch_id)
            for n, delay_s in enumerate(DELAYS_S[:-1], start=1):
                await eventually(lambda n=n: len(host.came) == n)
                await eventually(lambda: not at.service._webhooks._running)
                hands.pass_s(delay_s)
                await at.service._webhooks.deliver_due()
            await eventually(lambda: len(host.came) == len(DELAYS_S))
            await eventually(lambda: not at.service._webhooks._running)
        ended_s = hands.wall_s - sum(DELAYS_S[:-1])
        own = {} if is_turned_off else allowing(host)
        async with desk(tmp_path, hands=hands, retention_s=HOUR_S, **own) as at:
            await at.service.clean()
            assert (await at.state(batch_id)).failed_at == ended_s, "it is due in eight hours"
            hands.pass_s(DELAYS_S[-1])
            await at.service._webhooks.deliver_due()
            await eventually(lambda: not at.service._webhooks._running)
            hands.pass_s(HOUR_S + 1)
            await at.service.clean()
            with pytest.raises(NotFoundError):
                await at.state(batch_id)
        assert len(host.came) == len(DELAYS_S) + (not is_turned_off)


async def test_a_host_that_hangs_delays_nothing(tmp_path: Path) -> None:
    def answer(came: Came, host: Host) -> Answer:
        host.released.wait(30)
        return Answer()

    with http_host(answer) as host:
        async with desk(tmp_path, **allowing(host)) as at:
            input_id = await at.upload(line("a", **AUDIO))
            for _ in range(3):
                batch = await at.ended(await at.create(input_id, webhook_url=host.url))
                assert batch.status == "completed"


async def test_other_hosts_are_refused_at_once(tmp_path: Path) -> None:
    """And what is no host."""
    with http_host(lambda came, host: Answer()) as host:
        own = allowing(host) | {"webhook_hosts": (host.name, "a\0b")}
        async with desk(tmp_path, **own) as at:
            input_id = await at.upload(line("a", **AUDIO))
            urls = ("https://other.example/", "ftp://127.0.0.1/", "http://127.0.0.1:1/", "x")
            for url in (*urls, "https://a\0b/", "http://["):
                with pytest.raises(InvalidRequestError) as refused:
                    await at.create(input_id, webhook_url=url)
                assert refused.value.param == "webhook_url"
            assert (await at.service.list_batches("", None, 1)).data == []


async def test_what_is_never_taken_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unexpected failure is one of the tries, too, and delays no other delivery."""
    hands, n_bugs = Hands(), 0

    async def check(url: str, param: str) -> Destination:
        nonlocal n_bugs
        n_bugs += 1
        raise TypeError("a bug")

    with http_host(lambda came, host: Answer(302, headers={"location": "/"})) as host:
        async with desk(tmp_path, hands=hands, **allowing(host)) as at:
            input_id, webhooks = await at.upload(b"{"), at.service._webhooks
            batch_id = await at.create(input_id, webhook_url=host.url)
            with monkeypatch.context() as patch:
                patch.setattr(webhooks._rules, "check", check)
                await at.ended(batch_id)
                await eventually(lambda: bool(n_bugs) and not webhooks._running)
            for n in range(len(DELAYS_S)):
                await eventually(lambda n=n: len(host.came) == n and not webhooks._running)
                hands.pass_s(DELAYS_S[-1])
                await webhooks.deliver_due()
            await eventually(lambda: len(host.came) == len(DELAYS_S) and not webhooks._running)
            hands.pass_s(DELAYS_S[-1])
            await webhooks.deliver_due()
            assert not webhooks._running
            await at.ended(await at.create(input_id, webhook_url=host.url))
            await eventually(lambda: len(host.came) == len(DELAYS_S) + 1)


async def test_what_cannot_be_noted_is_not_made_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, every look would else deliver it once more."""
    with http_host(lambda came, host: Answer()) as host:
        async with desk(tmp_path, **allowing(host)) as at:
            store = at.service._owned.store

            def note(batch_id: str, delay_s: int | None) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(store, "note_webhook", note)
            await at.ended(await at.create(await at.upload(b"{"), webhook_url=host.url))
            await eventually(lambda: len(host.came) == 1)
            for _ in range(20):
                await at.service._webhooks.deliver_due()
                await asyncio.sleep(0.01)
        assert len(host.came) == 1


def test_a_secret_that_is_no_base64_is_refused(tmp_path: Path) -> None:
    for secret in (SECRET, SECRET + "AAA=", SECRET + "AA=="):
        make_batch_settings(tmp_path, webhook_secret=secret)
    for secret in (SECRET[:-4], SECRET + "A", SECRET + "AA", SECRET + "==="):
        with pytest.raises(ValueError, match="webhook_secret"):
            make_batch_settings(tmp_path, webhook_secret=secret)
