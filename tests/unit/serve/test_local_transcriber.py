"""Both roles in one process: on one device, and nothing stays of a start that failed."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any, NoReturn

import pytest
import torch

from cluster.common.errors import ConfigurationError
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.serve import in_process
from cluster.serve.in_process import local_engines, local_transcriber, on_one_device
from tests.support.checkpoints import cached_checkpoint

THREADS = ("encoder-engine", "decoder-engine", "kv-")


def make_settings(encoder: str, decoder: str) -> Settings:
    flags = {
        "model": str(cached_checkpoint()),
        "encoder": {"device": encoder, "threads": 1, "export_windows": 2},
        "decoder": {"device": decoder, "threads": 1, "kv_windows": 2},
    }
    return load_settings(None, flags, environ={})


def running() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(THREADS)}


async def fails(*args: Any) -> NoReturn:
    raise ConfigurationError("does not start")


def fails_when_made(*args: Any, **options: Any) -> NoReturn:
    raise ConfigurationError("does not start")


@pytest.mark.parametrize(
    ("part", "failing"),
    [
        ("make_importer", fails_when_made),
        ("EncoderEngine", fails_when_made),
        ("DecoderEngine", fails_when_made),
        ("AudioPool.start", fails),
    ],
)
async def test_a_failed_start_leaves_no_part_running(
    part: str, failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = running()
    monkeypatch.setattr(f"{in_process.__name__}.{part}", failing)
    with pytest.raises(ConfigurationError, match="does not start"):
        async with local_transcriber(make_settings("cpu", "cpu")):
            pass
    assert running() == before


async def test_a_start_that_is_cancelled_leaves_no_part_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, begun, go_on = running(), asyncio.Event(), threading.Event()
    loop, real = asyncio.get_running_loop(), in_process.DecoderEngine

    def slow(*args: Any, **options: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60.0)
        return real(*args, **options)

    monkeypatch.setattr(in_process, "DecoderEngine", slow)

    async def start() -> None:
        async with local_transcriber(make_settings("cpu", "cpu")):
            pytest.fail("it was cancelled before")

    starting = asyncio.ensure_future(start())
    await asyncio.wait_for(begun.wait(), 60.0)
    starting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert running() == before


@pytest.mark.parametrize(
    ("encoder", "decoder", "device"),
    [("auto", "auto", "cuda"), ("auto", "cpu", "cpu"), ("cpu", "auto", "cpu"), ("cuda",) * 3],
)
def test_both_roles_are_on_the_device_that_one_asks_for(
    encoder: str, decoder: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = on_one_device(make_settings(encoder, decoder))
    assert (settings.encoder.device, settings.decoder.device) == (device, device)


def test_two_devices_in_one_process_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"encoder.device is 'cpu', decoder.device 'cuda'"):
        on_one_device(make_settings("cpu", "cuda"))


async def test_workers_are_ready_once_their_kernels_are_built(
    caplog: pytest.LogCaptureFixture,
) -> None:
    role = {"device": "cpu", "dtype": "float32"}
    with caplog.at_level(logging.INFO):
        async with local_engines(load_settings(None, {"encoder": role, "decoder": role}, {})):
            for name in ("encoder", "decoder"):
                assert f"{name} kernels are ready" in caplog.text
