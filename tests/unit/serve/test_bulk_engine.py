"""Bulk work gives the texts of the file endpoint, as windows of the class `bulk`, and waits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.errors import (
    InvalidAudioError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    UnsupportedValueError,
    WorkerGoneError,
)
from cluster.common.messages import DecodeRequest, DecodeResult, EncodeReply, EncodeRequest
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.demo.samples import sample_path
from cluster.serve.bulk.engine import BulkEngine
from cluster.serve.in_process import LocalEngines, local_engines, transcriber_over
from cluster.serve.model_parts import served_model
from cluster.serve.replicas.router_replica import without_secrets
from router.http.models import ModelRegistry
from router.http.routes import create_app
from router.pools import EnginePool, Unbounded
from tests.support.archives import same_answer
from tests.support.router_fakes import client_of, post

MODEL = (("model", "whisper-1"),)
MAX_ATTEMPTS = 8
PAUSES_S = (0.05, 0.2, 0.8, 3.2, 12.8, 51.2, 60.0)  # at most, after failures
VERBOSE = (
    *MODEL,
    ("response_format", "verbose_json"),
    ("timestamp_granularities[]", "segment"),
    ("timestamp_granularities[]", "word"),
)


def make_settings(**router: Any) -> Settings:
    role = {"threads": 1, "device": "cpu", "dtype": "float32"}
    flags = {
        "router": {"audio_workers": 1, "max_attempts": MAX_ATTEMPTS, **router},
        "encoder": role,
        "decoder": role,
    }
    return load_settings(None, flags, environ={})


@dataclass
class Watched(Unbounded):
    pool: EnginePool
    errors: list[Exception] = field(default_factory=list)
    seen: list[EncodeRequest | DecodeRequest] = field(default_factory=list)

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        self.seen.append(request)
        if self.errors:
            raise self.errors.pop(0)
        return await self.pool.encode(request)

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        self.seen.append(request)
        return await self.pool.decode(request)

    async def status(self) -> Any:
        return await self.pool.status()


@dataclass
class Opened:
    engine: BulkEngine
    encoders: Watched
    decoders: Watched
    engines: LocalEngines


@asynccontextmanager
async def opened(clock: Clock | None = None) -> AsyncIterator[Opened]:
    settings = make_settings()
    (name,) = settings.by_model()
    more = {} if clock is None else {"clock": clock}
    async with local_engines(settings) as engines:
        encoders = Watched(engines.pool("encoder"))
        decoders = Watched(engines.pool("decoder"))
        pools = {name: (encoders, decoders)}
        async with BulkEngine.over_pools(settings, pools, **more) as engine:
            yield Opened(engine, encoders, decoders, engines)


async def endpoints_answer(engines: LocalEngines, fields: Any) -> bytes:
    (name,) = engines.settings.by_model()
    form: dict[str, list[str]] = {}
    for key, text in fields:
        form.setdefault(key, []).append(text)
    async with transcriber_over(engines) as transcriber:
        registry = ModelRegistry([served_model(engines.settings, name, transcriber)])
        async with client_of(create_app(registry, engines.settings.router)) as client:
            answer = await post(client, sample_path("long").read_bytes(), **form)
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_a_file_gets_the_endpoints_answer() -> None:
    async with opened() as it:
        for fields, upload in (
            (VERBOSE, sample_path("long")),
            ((*MODEL, ("include[]", "logprobs")), sample_path("long").read_bytes()),
        ):
            expected = await endpoints_answer(it.engines, fields)
            seconds: list[tuple[float, float]] = []
            result = await it.engine.transcribe(
                upload,
                it.engine.params(fields),
                on_progress=lambda done_s, known_s, seen=seconds: seen.append((done_s, known_s)),
            )
            answer, theirs = result.body(), json.loads(expected)
            assert same_answer(answer, theirs), f"{answer}\n{theirs}"
            assert seconds[-1][1] == pytest.approx(result.transcript.duration_s, abs=0.01)
        assert {one.priority for one in (*it.encoders.seen, *it.decoders.seen)} == {"bulk"}


@asynccontextmanager
async def without_workers(
    settings: Settings | None = None, **router: Any
) -> AsyncIterator[BulkEngine]:
    settings = settings or make_settings()
    nobody: Any = None
    pools = dict.fromkeys(settings.by_model(), (nobody, nobody))
    async with BulkEngine.over_pools(settings, pools, **router) as engine:
        yield engine


async def test_what_the_endpoint_refuses_is_refused() -> None:
    async with without_workers(max_audio_s=1.0) as engine:
        with pytest.raises(InvalidAudioError, match="longer"):
            await engine.transcribe(sample_path("short"), engine.params(MODEL))
        with pytest.raises(InvalidAudioError):
            await engine.transcribe(b"no audio at all", engine.params(MODEL))
        with pytest.raises(ModelNotFoundError):
            engine.params([("model", "unknown")])
        with pytest.raises(InvalidRequestError, match="temperature"):
            engine.params([*MODEL, ("temperature", "9")])
        with pytest.raises(UnsupportedValueError) as refused:
            engine.params([*MODEL, ("stream", "true")])
        assert refused.value.param == "stream"
        with pytest.raises(UnsupportedValueError, match="cannot translate"):
            engine.params(MODEL, "translate")
        assert engine.params([*MODEL, ("text", "One.")], "align").known_lines == ("One.",)


async def test_without_a_network_voices_are_refused_before_any_file() -> None:
    diarize = ("diarize", "true")
    async with without_workers() as engine:
        assert engine.params([*MODEL, diarize]).speakers.by == "voice"
    several = {"models": {"one": {"model": "demo"}}, "router": {"audio_workers": 1}}
    async with without_workers(load_settings(None, several, environ={})) as engine:
        with pytest.raises(UnsupportedValueError, match=r"speakers\.model"):
            engine.params([("model", "one"), diarize])


def make_hasty_clock() -> tuple[Clock, list[float]]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    return Clock(SYSTEM_CLOCK.monotonic, sleep, SYSTEM_CLOCK.random), waits


async def test_full_pools_are_outwaited_and_lost_workers_survived() -> None:
    clock, waits = make_hasty_clock()
    async with opened(clock) as it:
        it.encoders.errors[:] = [
            *(OverloadedError("full") for _ in range(40)),
            *(WorkerGoneError("gone") for _ in PAUSES_S),
        ]
        result = await it.engine.transcribe(sample_path("short"), it.engine.params(MODEL))
        assert result.transcript.text
        assert not it.encoders.errors
    full, failed = waits[:40], waits[40:]
    assert max(full) <= 2.0, "they are asked often"
    assert [0.5 <= wait / pause <= 1.0 for wait, pause in zip(failed, PAUSES_S, strict=True)]
    assert sum(PAUSES_S) > 120.0, "in which workers are replaced"


async def test_a_window_that_kills_workers_is_tried_only_so_often() -> None:
    clock, _ = make_hasty_clock()
    async with opened(clock) as it:
        it.encoders.errors[:] = [WorkerGoneError("gone") for _ in range(100)]
        with pytest.raises(OverloadedError, match="no worker could finish"):
            await it.engine.transcribe(sample_path("short"), it.engine.params(MODEL))
        assert len(it.encoders.seen) == MAX_ATTEMPTS


def test_what_routers_tell_of_their_settings_has_no_secrets() -> None:
    settings = load_settings(
        None,
        {
            "cluster_key": "5ecret" * 8,
            "router": {"api_key": ("sk-1",), "max_requests_per_key": 2},
            "batches": {"webhook_secret": f"whsec_5ecret{'x' * 26}"},
        },
        environ={},
    )
    told = without_secrets(settings)
    assert "5ecret" not in repr(told.model_dump())
    assert "sk-1" not in repr(told.model_dump())
    assert told.router.max_requests_per_key == 2
