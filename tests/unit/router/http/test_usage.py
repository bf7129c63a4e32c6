"""What keys use and may: limits, the account, metrics by name, and the access log's lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from openai import AsyncOpenAI

from cluster.common.errors import QuotaExceededError, RateLimitError
from cluster.common.logs import configure_logging
from cluster.common.metrics import ROUTER_METRICS, silent_recorder
from router.http.keys import KeyRing
from router.http.routes import create_app
from router.http.usage import DAY_S, UsageAccount
from tests.support.router_fakes import (
    AUDIO,
    MODEL_FORM,
    URL,
    FakeTranscriber,
    client_of,
    error_of,
    make_registry,
    make_settings,
    post,
)

NOON_S = 20_000.5 * DAY_S
KEYS = ("ann s3cret-one", "s3cret-two")


class Account:
    def __init__(self, **limits: float) -> None:
        settings = make_settings(api_key=KEYS, **limits)
        self.now_s = NOON_S
        self.usage = UsageAccount(
            KeyRing(KEYS), settings, silent_recorder(ROUTER_METRICS), lambda: self.now_s
        )


def test_requests_a_minute_are_each_keys_own_and_come_back_with_time() -> None:
    account = Account(max_requests_per_minute=2)
    account.usage.begin(0)
    account.usage.begin(0)
    for _ in range(3):
        with pytest.raises(RateLimitError, match="2 requests a minute") as refused:
            account.usage.begin(0)
        assert refused.value.retry_after_s == pytest.approx(30.0), "a refusal costs nothing"
    account.usage.begin(1)
    account.now_s += 30.1
    account.usage.begin(0)
    with pytest.raises(RateLimitError):
        account.usage.begin(0)


def test_hours_of_audio_end_with_the_day() -> None:
    account = Account(max_audio_hours_per_day=0.5)
    account.usage.begin(0)
    account.usage.add_audio(0, 1800.0)
    with pytest.raises(QuotaExceededError, match=r"0\.5 hours") as refused:
        account.usage.begin(0)
    assert refused.value.retry_after_s == DAY_S / 2
    account.usage.begin(1)
    account.now_s += DAY_S / 2
    account.usage.begin(0)


def test_without_limits_or_keys_nobody_is_refused() -> None:
    account = Account()
    for owner in (None, 0):
        for _ in range(1000):
            account.usage.begin(owner)
            account.usage.add_audio(owner, 3600.0)


def test_days_are_told_apart_and_not_kept_for_ever() -> None:
    account = Account()
    for _ in range(40):
        account.usage.begin(0)
        account.usage.add_audio(0, 1.25)
        account.now_s += DAY_S
    days = account.usage.buckets(0, 0, 1e12)
    assert len(days) == 31
    assert all(day["results"][0]["seconds"] == 2 for day in days)
    first = days[0]["start_time"]
    assert account.usage.buckets(0, first, first + DAY_S) == days[:1]
    assert account.usage.buckets(1, 0, 1e12) == []


def test_lines_of_batches_count_as_their_owner_tells() -> None:
    account = Account(max_audio_hours_per_day=1.0)
    today = int(NOON_S // DAY_S)
    account.usage.note_batches(0, [(today - 1, 5, 9000.0), (today, 2, 1800.5)])
    account.usage.begin(0)
    account.usage.add_audio(0, 1700.0)
    account.usage.begin(0)
    account.usage.add_audio(0, 100.0)
    with pytest.raises(QuotaExceededError):
        account.usage.begin(0)
    account.usage.begin(1)
    before, now = (day["results"][0] for day in account.usage.buckets(0, 0, 1e12))
    assert (before["seconds"], before["num_model_requests"]) == (9000, 5)
    assert (now["seconds"], now["num_model_requests"]) == (3601, 4)


async def test_each_key_reads_its_own_use_as_openai_tells_it() -> None:
    app = create_app(make_registry(FakeTranscriber()), make_settings(api_key=KEYS))
    async with client_of(app) as client:
        for key in ("s3cret-one", "s3cret-one", "s3cret-two"):
            headers = {"authorization": f"Bearer {key}"}
            files = {"file": ("a", AUDIO)}
            await client.post(URL, data=MODEL_FORM, files=files, headers=headers)
        sdk = AsyncOpenAI(
            base_url="http://test/v1", api_key="s3cret-one", admin_api_key="s3cret-one",
            http_client=client,
        )  # fmt: skip
        page = await sdk.admin.organization.usage.audio_transcriptions(start_time=0)
        (day,) = page.data
        (used,) = day.results
        assert (used.seconds, used.num_model_requests, used.api_key_id) == (17, 2, "ann")
        assert day.end_time - day.start_time == DAY_S
        headers = {"authorization": "Bearer s3cret-two"}
        text = (await client.get("/metrics", headers=headers)).text
        assert 'splitscribe_key_requests_total{key="ann"} 2.0' in text
        assert 'splitscribe_key_audio_seconds_total{key="ann"} 16.94' in text
        assert "s3cret" not in text


async def test_a_limit_is_a_429_with_openais_body() -> None:
    settings = make_settings(
        api_key="key", max_requests_per_minute=2, max_audio_hours_per_day=0.001
    )
    async with client_of(create_app(make_registry(FakeTranscriber()), settings)) as client:
        client.headers["authorization"] = "Bearer key"
        assert (await post(client)).status_code == 200  # 8.47 s; 3.6 s are allowed
        answer = await post(client)
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (429, "insufficient_quota")
        assert 0 < int(answer.headers["retry-after"]) <= DAY_S
        assert answer.headers["x-should-retry"] == "false"
        assert (await client.get("/v1/models")).status_code == 200


@contextmanager
def logged(encoding: str) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logger = logging.getLogger("router")
    before = (logger.handlers, logger.level, logger.propagate)
    configure_logging(
        "INFO", ("router",), role="router", replica="r", encoding=encoding, stream=stream
    )  # type: ignore[arg-type]
    try:
        yield stream
    finally:
        logger.handlers, logger.level, logger.propagate = before


async def test_a_request_is_one_line_of_the_access_log() -> None:
    app = create_app(make_registry(FakeTranscriber()), make_settings(api_key=KEYS))
    headers = {"authorization": "Bearer s3cret-one", "x-request-id": "mine"}
    files = {"file": ("a", AUDIO)}
    async with client_of(app) as client:
        with logged("json") as stream:
            for stream_it in ({}, {"stream": "true"}):
                data = {**MODEL_FORM, **stream_it}
                await client.post(URL, data=data, files=files, headers=headers)
            await client.get("/v1/no%1b[31m%e2%80%a8", headers=headers)
            for probe in ("/livez", "/readyz", "/health"):
                await client.get(probe)
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        lines = [line for line in lines if line["logger"].endswith("middleware")]
        with logged("plain") as stream:
            await client.post(URL, data=MODEL_FORM, files=files, headers=headers)
    whole, streamed, unknown = lines
    for line in (whole, streamed):
        assert (line["request_id"], line["key"], line["status"]) == ("mine", "ann", 200)
        assert (line["duration_s"], line["windows"], line["encode_s"]) == (8.47, 2, 0.003)
        assert {"upload_s", "audio_s", "queue_s", "transfer_s", "decode_s", "wall_s"} <= set(line)
    assert (unknown["status"], unknown["path"]) == (404, "/v1/no%1B%5B31m%E2%80%A8")
    (text,) = [line for line in stream.getvalue().splitlines() if " 200 in " in line]
    assert " mine " in text
    assert " by ann: transcribed 8.47 s of audio in 2 windows (upload " in text
    assert "s3cret" not in text
