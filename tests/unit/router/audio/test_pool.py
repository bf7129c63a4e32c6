"""The pool decodes many uploads at once, and no upload can harm another."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from cluster.common.errors import (
    ConfigurationError,
    DeadlineExceededError,
    InvalidAudioError,
    RateLimitError,
    WorkerError,
)
from cluster.common.settings import RouterSettings
from router.api.params import Chunking
from router.audio.pool import ENDED_S, AudioPool
from router.audio.protocol import AudioLimits
from router.audio.stream import CREDIT, AudioStream
from router.audio.windows import Window
from router.audio.worker import AudioWorker, Upload
from router.audio.worker_handle import BOOT
from tests.support.audio.audio_pools import freeze_on, pids, request, running, until, worker_of
from tests.support.audio.bombs_of_frames import chunk, many_texts
from tests.support.audio.sounds import encode, joined, silence, tone, voice, write_wav

pytestmark = pytest.mark.asyncio(loop_scope="module")  # that of the shared `pool`


def opened(
    pool: AudioPool, path: Path, client: bytes = b"", **wishes: Any
) -> AbstractAsyncContextManager[AudioStream]:
    return pool.open(path, request(client), **wishes)


async def read(pool: AudioPool, path: Path, **wishes: Any) -> tuple[list[Window], AudioStream]:
    async with opened(pool, path, **wishes) as stream:
        return await drain(stream), stream


def spans(windows: list[Window]) -> list[tuple[int, int]]:
    return [(w.start_sample, w.n_samples) for w in windows]


async def drain(stream: AudioStream) -> list[Window]:
    return [window async for window in stream]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audio") / "clip"
    return write_wav(path, joined(silence(0.2), voice(2.0), silence(0.2)))


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven minutes, and a second of work for a worker."""
    return write_wav(tmp_path_factory.mktemp("audio") / "long", voice(400.0))


# ------------------------------------------------------------------------- one after another


async def test_a_client_may_wish_how_it_is_cut(pool: AudioPool, tmp_path: Path) -> None:
    path = write_wav(tmp_path / "upload", joined(silence(5.0), voice(3.0)))
    wishes = (None, Chunking(prefix_padding_ms=1500), Chunking(threshold=1.0))
    found = [(await read(pool, path, chunking=chunking))[0] for chunking in wishes]
    (usual,), (padded,), nothing = ([window.start_s for window in windows] for windows in found)
    assert usual - padded == pytest.approx(1.0, abs=0.01)
    assert nothing == []


async def test_an_upload_becomes_windows_with_true_offsets(pool: AudioPool, tmp_path: Path) -> None:
    pcm = joined(voice(20.0), silence(1.0), voice(20.0), silence(12.0), voice(5.0))
    path = write_wav(tmp_path / "upload", pcm)
    async with opened(pool, path) as stream:
        assert stream.expected_s == pytest.approx(58.0)
        windows = await drain(stream)
    assert stream.duration_s == pytest.approx(58.0)
    assert stream.decode_s > 0
    assert [w.index for w in windows] == [0, 1, 2]
    for window in windows:
        assert np.array_equal(window.pcm, pcm[window.start_sample :][: window.n_samples])
    assert windows[-1].start_s == pytest.approx(52.7, abs=0.3)


# ------------------------------------------------------------------------ many at once


async def test_a_worker_is_started_when_there_are_more_uploads_than_workers(
    clip: Path, long_file: Path
) -> None:
    async with running(audio_workers=3) as pool:
        for _ in range(3):
            await read(pool, clip)
        assert len(pids(pool)) == 1, "one upload after another needs one worker"
        async with opened(pool, long_file) as stream:
            await anext(stream)
            await read(pool, clip)
            await until(lambda: [w.is_able for w in pool._workers] == [True, True])
            await asyncio.gather(*(read(pool, clip) for _ in range(3)))
            await until(lambda: [w.is_able for w in pool._workers] == [True, True, True])
        await asyncio.gather(*(read(pool, clip) for _ in range(8)))
        assert len(pids(pool)) == 3


async def test_only_who_hears_the_same_channel_has_to_share_a_worker(
    clip: Path, tmp_path: Path
) -> None:
    call = encode(tmp_path / "call", voice(100.0), "wav", "pcm_s16le", 16_000, "stereo")
    async with running(audio_workers=2) as pool:
        await asyncio.gather(*(read(pool, clip) for _ in range(3)))
        await until(lambda: [w.is_able for w in pool._workers] == [True, True])
        async with (
            opened(pool, call, channel=0) as left,
            opened(pool, call, channel=1) as right,
            opened(pool, call, channel=0) as again,
        ):
            assert worker_of(pool, left) is worker_of(pool, again)
            assert worker_of(pool, left) is not worker_of(pool, right)


async def test_short_clips_pass_a_long_file(pool: AudioPool, clip: Path, long_file: Path) -> None:
    async with opened(pool, long_file) as stream:
        work = asyncio.create_task(drain(stream))
        await until(lambda: stream.n_received > 0)
        for _ in range(5):
            await read(pool, clip)
        assert not work.done(), "the long file was decoded before the clips"
        windows = await work
    assert stream.duration_s == pytest.approx(400.0)
    assert len(windows) >= 13


async def test_clips_pass_long_files_that_wait_for_a_place(
    clip: Path, long_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.audio.pool.MAX_UPLOADS", 3)
    monkeypatch.setattr("router.audio.pool.MAX_LONG", 2, raising=False)
    async with running() as pool, opened(pool, long_file), opened(pool, long_file):
        waiting = asyncio.create_task(read(pool, long_file))
        await asyncio.sleep(0)
        assert len((await read(pool, clip))[0]) == 1
        assert pool._waiting, "the third long file has the clip's place"
        waiting.cancel()


async def test_a_worker_serves_a_clip_in_three_of_four_steps_whatever_else_it_has() -> None:
    def steps(n: int) -> Iterator[None]:
        for _ in range(n):
            yield None

    nobody: Any = MagicMock()
    limits = AudioLimits(10**9, 1e9, 0.0, 1e9, 10**9)
    worker = AudioWorker(nobody, nobody, limits)
    for id in range(1, 19):
        worker._uploads[id] = Upload(id, steps(100), credit=2, busy_s=1.0)  # type: ignore[arg-type]
    clip = worker._uploads[19] = Upload(19, steps(12), credit=2)  # type: ignore[arg-type]
    chosen = []
    for _ in range(16):
        upload = worker._next_upload()
        assert upload is not None
        worker._step(upload)
        chosen.append(upload.id)
    assert chosen.count(clip.id) >= 12
    assert len({id for id in chosen if id != clip.id}) >= 3, "others stand still"


async def test_a_slow_consumer_is_waited_for(pool: AudioPool, clip: Path, long_file: Path) -> None:
    async with opened(pool, long_file) as stream:
        await until(lambda: stream.n_received == CREDIT)
        await read(pool, clip)
        worker = worker_of(pool, stream)
        await until(lambda: worker.slot.get() == 0)
        assert stream.n_received == CREDIT
        await anext(stream)
        await until(lambda: stream.n_received == CREDIT + 1)


async def test_a_path_may_be_another_uploads_while_the_first_is_in_work(
    long_file: Path, tmp_path: Path
) -> None:
    """As descriptors are: what was heard of the first one's speech is not the second one's."""
    pcm = joined(silence(12.0), voice(20.0), silence(3.0), voice(20.0))
    path, other = tmp_path / "upload", write_wav(tmp_path / "other", pcm)
    path.symlink_to(long_file)
    async with running() as pool, opened(pool, path) as first:
        expected, _ = await read(pool, other)
        await anext(first)
        path.unlink()
        path.symlink_to(other)
        windows, _ = await read(pool, path)
    assert spans(windows) == spans(expected)
    assert [window.speech for window in windows] == [window.speech for window in expected]


# ------------------------------------------------------------------------- workers that die


async def test_a_killed_worker_fails_only_the_upload_it_was_on(
    clip: Path, long_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.audio.pool.MAX_MOVES", 0)
    other_file = write_wav(tmp_path / "other", voice(150.0))
    async with running() as pool:
        undisturbed = spans((await read(pool, other_file))[0])
        async with opened(pool, other_file) as other, opened(pool, long_file) as victim:
            first = await anext(other)
            await until(lambda: other.n_received == CREDIT + 1)
            work = asyncio.create_task(drain(victim))
            os.kill(await freeze_on(pool, victim), signal.SIGKILL)
            with pytest.raises(WorkerError, match="died on this upload"):
                await work
            rest = await drain(other)
        assert spans([first, *rest]) == undisturbed, "the other upload lost or repeated windows"
        assert other.duration_s == pytest.approx(150.0)
        assert len((await read(pool, clip))[0]) == 1


async def test_a_worker_whose_machine_stood_in_between_goes_on(
    long_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a paused container does. An upload's time is the processor's."""
    monkeypatch.setattr("router.audio.pool.STALLED_LOOKS", 1000)
    async with running(audio_timeout_s=3.0) as pool, opened(pool, long_file) as stream:
        work = asyncio.create_task(drain(stream))
        pid = await freeze_on(pool, stream)
        await asyncio.sleep(4.0)
        os.kill(pid, signal.SIGCONT)
        assert len(await work) >= 14
        assert pids(pool) == [pid]


async def test_a_worker_that_computes_too_long_in_one_step_is_killed(
    clip: Path, long_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tag of texts, each of which libav compares with all before it: an hour's work."""
    monkeypatch.setattr(
        "router.audio.worker_handle.BOOT",
        BOOT.replace("main()", "import router.audio.worker as w; w.MAX_STEP_S = 0.3; main()"),
    )
    bomb = tmp_path / "bomb"
    write_wav(bomb, tone(1.0))
    bomb.write_bytes(bomb.read_bytes() + chunk(b"ID3 ", many_texts(1_000_000)))
    async with running() as pool, opened(pool, long_file) as other:
        with pytest.raises(InvalidAudioError, match="a part of it longer"):
            await read(pool, bomb)
        assert len(await drain(other)) > 1
        assert len((await read(pool, clip))[0]) == 1


async def test_an_upload_over_its_time_fails_alone(clip: Path, long_file: Path) -> None:
    async with running(audio_timeout_s=0.3) as pool:
        before = pids(pool)
        with pytest.raises(InvalidAudioError, match=r"longer than 0\.3 s"):
            await read(pool, long_file)
        assert len((await read(pool, clip))[0]) == 1
        assert pids(pool) == before


def a_forged_table(path: Path) -> Path:
    """An MP4 file of 400 million samples, as it says: libav asks for memory for each."""
    mp4 = encode(path, tone(1.0), "mp4", "aac", 16_000).read_bytes()
    at = mp4.index(b"stsz")
    forged = b"stz2" + bytes(7) + b"\4" + struct.pack(">I", 400_000_000)
    path.write_bytes(mp4[:at] + forged + mp4[at + len(forged) :])
    return path


async def test_an_upload_over_its_memory_fails_alone(
    clip: Path, long_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.audio.pool.MAX_MOVES", 0)
    huge = a_forged_table(tmp_path / "huge")
    async with running(audio_memory_mb=128) as pool, opened(pool, long_file) as other:
        first = await anext(other)
        with pytest.raises(InvalidAudioError, match="128 MB"):
            await read(pool, huge)
        assert len((await read(pool, clip))[0]) == 1
        assert len([first, *await drain(other)]) >= 13


async def test_a_client_whose_uploads_end_workers_is_refused_for_a_while(
    clip: Path, long_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.audio.pool.MOST_ENDED", 2)
    async with running() as pool:
        for waits in (True, False):
            async with opened(pool, long_file, client=b"bad") as stream:
                pid = await freeze_on(pool, stream)
                if waits:
                    os.kill(pid, signal.SIGKILL)
                    with pytest.raises(WorkerError, match="died on this upload"):
                        await drain(stream)
            if not waits:
                os.kill(pid, signal.SIGKILL)
        await until(lambda: pid not in pids(pool))
        with pytest.raises(RateLimitError, match="ended while they decoded audio") as refused:
            await read(pool, clip, client=b"bad")
        assert 0 < refused.value.retry_after_s <= ENDED_S
        for other in (b"good", b""):
            assert len((await read(pool, clip, client=other))[0]) == 1
        monkeypatch.setattr("router.audio.pool.ENDED_S", 0.0)
        assert len((await read(pool, clip, client=b"bad"))[0]) == 1


async def test_a_worker_that_cannot_be_had_in_time(clip: Path) -> None:
    async with running() as pool:
        os.kill(pids(pool)[0], signal.SIGSTOP)
        with pytest.raises(DeadlineExceededError):
            async with pool.open(clip, request(time_s=0.1)):
                pass
        os.kill(pids(pool)[0], signal.SIGCONT)
        assert len((await read(pool, clip))[0]) == 1


# ----------------------------------------------------------------------------- its own end


async def test_a_worker_that_cannot_start_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.audio.worker_handle.BOOT", "raise SystemExit(7)")
    pool = AudioPool(RouterSettings.model_validate({"audio_workers": 2}))
    with pytest.raises(ConfigurationError, match="exit code 7"):
        await pool.start()


def test_the_router_process_loads_no_codec_and_no_model() -> None:
    code = "import sys, router.audio.pool; print({'av', 'onnxruntime', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
