"""A replica that is both pools, without Ray."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.common.errors import DeadlineExceededError, HandleRefusedError
from cluster.common.kv.exporter import KVExporter
from cluster.common.messages import (
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
)
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.serve.own_calls import OwnCalls
from cluster.serve.replicas.pool_replicas import ColocatedWorker
from cluster.serve.replicas.workers import SWITCH_S
from cluster.serve.serve_pool import ServePool
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import make_pcm
from tests.support.workers.decoder_engines import assert_follow


class Handle:
    deployment_id = "worker"

    def __init__(self, worker: ColocatedWorker) -> None:
        self._worker = worker

    def options(self, **options: Any) -> Handle:
        return self

    def broadcast(self, method: str) -> Handle:
        assert method == "status"
        return self

    async def results_async(self, **options: Any) -> list[Any]:
        return [await self._worker.status(), RuntimeError("a replica that died")]


def make_settings(windows: int, shape: str = "micro", **role: Any) -> Settings:
    role = {"threads": 1, "device": "cpu", **role}
    flags = {
        "model": str(cached_checkpoint(shape)),
        "cluster_key": "k" * 32,
        "encoder": {**role, "export_windows": windows},
        "decoder": {**role, "kv_windows": windows, "max_batch": 8},
    }
    return load_settings(None, flags, environ={})


@pytest.mark.usefixtures("as_replica")
async def test_one_worker_encodes_decodes_and_drains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "cluster.serve")
    settings = make_settings(2)
    worker = ColocatedWorker(settings, "build")
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    options = DecodeOptions(language="en", max_new_tokens=8)

    async def handed_over() -> DecodeRequest:
        reply = await worker.encode(EncodeRequest("r", 0, 0, make_pcm(1.0), 30.0))
        return DecodeRequest("r", 0, 0, reply.handle, options, 30.0)

    plain = await worker.decode(await handed_over())
    assert plain.timings.transport == "memory"
    (told,) = (one for one in caplog.records if "decoded at attempt" in one.getMessage())
    fields = told.__dict__["log_fields"]
    expected = {"finish_reason": plain.finish_reason, "temperature": 0.0, "fallbacks": 0}
    assert expected.items() <= fields.items()
    requests = [await handed_over() for _ in range(2)]
    results = await asyncio.gather(*map(worker.decode, requests))
    assert all(one.tokens == plain.tokens for one in results)

    worker.check_health()
    handle = Handle(worker)
    (encoder,) = await ServePool(handle, "encoder", OwnCalls()).status()
    (decoder,) = await ServePool(handle, "decoder", OwnCalls()).status()
    assert (encoder.role, encoder.replica) == ("encoder", "encoder-1")
    assert (decoder.role, decoder.replica) == ("decoder", "decoder-1")
    await worker.shut_down()


async def test_what_goes_wrong_is_counted(as_replica: dict[tuple[str, ...], float]) -> None:
    settings = make_settings(2)
    worker = ColocatedWorker(settings, "build")
    encode, decode = worker._encoder, worker._decoder
    reply = await worker.encode(EncodeRequest("r", 0, 1, make_pcm(1.0), 30.0))
    options = DecodeOptions(language="en", max_new_tokens=4)
    forged = replace(reply.handle, frames=7)
    with pytest.raises(HandleRefusedError):
        await worker.decode(DecodeRequest("r", 0, 1, forged, options, 30.0))
    with pytest.raises(DeadlineExceededError):
        await worker.encode(EncodeRequest("r", 1, 1, make_pcm(1.0), -1.0))
    with pytest.raises(DeadlineExceededError):
        await worker.decode(DecodeRequest("r", 0, 1, reply.handle, options, -1.0))
    exporter = encode._kv
    assert isinstance(exporter, KVExporter)
    exporter.handle_notifications([b"nonsense", b"REL:" + b"0" * 32])
    lost = exporter.reserve(exporter.layout.pages_per_window)
    assert lost is not None
    exporter.lease_s = 0.0
    exporter.publish(lost, request_id="r", window=2, attempt=1, frames=1500)
    async with asyncio.timeout(30.0):
        while not exporter.n_expired:  # noqa: ASYNC110 - another thread is waited for
            await asyncio.sleep(0.01)
    for _ in range(2):  # telling again counts nothing twice
        encode._report()
        decode._report()
    await worker.shut_down()
    expected = {
        ("splitscribe_refused_handles_total", "signature"): 1,
        ("splitscribe_refused_notifications_total", "malformed"): 1,
        ("splitscribe_refused_notifications_total", "unknown_lease"): 1,
        ("splitscribe_encoder_failed_windows_total", "expired"): 1,
        ("splitscribe_failed_sequences_total",): 1,
        ("splitscribe_expired_leases_total",): 1,
    }
    assert {name: as_replica[name] for name in expected} == expected


async def transcribed(device: str, dtype: str, shape: str, n: int) -> list[DecodeResult]:
    settings = make_settings(8, shape, device=device, dtype=dtype, threads=0)
    worker = ColocatedWorker(settings, "build")
    options = DecodeOptions(language="en", max_new_tokens=40)

    async def one(seed: int) -> DecodeResult:
        request = EncodeRequest("r", 0, 0, make_pcm(0.5 + seed, seed), 60.0)
        handle = (await worker.encode(request)).handle
        return await worker.decode(DecodeRequest("r", 0, 0, handle, options, 60.0))

    results = await asyncio.gather(*map(one, range(n)))
    await worker.shut_down()
    return list(results)


@pytest.mark.gpu
@pytest.mark.usefixtures("as_replica")
async def test_both_roles_on_one_gpu_overlap_without_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch's default for convs
    expected = await transcribed("cpu", "float32", "micro", 24)
    found = await transcribed("cuda", "float32", "micro", 24)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


@pytest.mark.gpu
@pytest.mark.timeout(900)  # the first test with heads of 64 compiles the kernels
@pytest.mark.usefixtures("as_replica")
@pytest.mark.parametrize("shape", ["base", "large-v3"])
async def test_both_roles_on_one_gpu_in_bfloat16_follow_the_cpu(shape: str) -> None:
    expected = await transcribed("cpu", "float32", shape, 8)
    found = await transcribed("cuda", "bfloat16", shape, 8)
    assert_follow(found, expected, tolerance=0.1, share=0.7)
