"""An upload that is opened whole can be read in any order, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest
import whisper.audio
from numpy.typing import NDArray

from cluster.common.errors import (
    AudioTooShortError,
    DeadlineExceededError,
    InvalidAudioError,
    OverloadedError,
    WorkerError,
)
from cluster.common.messages import WINDOW_SAMPLES
from router.audio.pool import AudioPool
from router.audio.stream import WholeAudio
from router.audio.windows import Pieces
from tests.support.audio.audio_pools import PATIENCE_S, freeze_on, pids, running, until
from tests.support.audio.sounds import encode, joined, silence, tone, voice, write_wav

pytestmark = pytest.mark.asyncio(loop_scope="module")  # that of the shared `pool`

N_MELS = 80


@pytest.fixture(scope="module")
def long_pcm() -> NDArray[np.int16]:
    return joined(silence(12.0), voice(140.0), silence(31.77))


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory, long_pcm: NDArray[np.int16]) -> Path:
    return write_wav(tmp_path_factory.mktemp("audio") / "long", long_pcm)


def open_whole(pool: AudioPool, path: Path) -> AbstractAsyncContextManager[WholeAudio]:
    return pool.open_whole(path, request_id="r", timeout_s=PATIENCE_S, n_mels=N_MELS)


async def load(pool: AudioPool, path: Path) -> tuple[NDArray[np.int16], WholeAudio]:
    async with open_whole(pool, path) as audio:
        await audio.load()
        return await audio.read(0, audio.n_samples), audio


def is_gone(audio: WholeAudio) -> bool:
    """Its file has no name, so closing it is deleting it."""
    return audio._file.closed


async def test_every_sample_can_be_read_silence_included(
    pool: AudioPool, long_file: Path, long_pcm: NDArray[np.int16]
) -> None:
    found_s: list[float] = []
    async with open_whole(pool, long_file) as audio:
        assert audio.expected_s == pytest.approx(183.77)
        await audio.load(found_s.append)
        assert audio.n_samples == long_pcm.shape[0]
        assert audio.decode_s > 0
        for start, stop in ((0, 10), (479_990, 480_010), (1_000_000, 10**9), (5, 5), (7, 3)):
            piece = await audio.read(start, stop)
            assert piece.dtype == np.int16
            assert np.array_equal(piece, long_pcm[start:stop])
    assert found_s == sorted(found_s)
    assert found_s[-1] == pytest.approx(183.77)


async def test_the_peak_is_the_references(
    pool: AudioPool, long_file: Path, long_pcm: NDArray[np.int16]
) -> None:
    _, audio = await load(pool, long_file)
    floats = long_pcm.astype(np.float32) / 32_768
    expected = whisper.audio.log_mel_spectrogram(floats, N_MELS, padding=WINDOW_SAMPLES).max()
    assert audio.log_max == pytest.approx(float(expected) * 4 - 4, abs=1e-5)


async def test_the_worker_is_free_once_all_is_read(pool: AudioPool, long_file: Path) -> None:
    """A file is decoded in seconds and transcribed in minutes."""
    async with open_whole(pool, long_file) as audio:
        await audio.load()
        (worker,) = pool._workers
        assert worker.streams == {}
        assert (await audio.read(0, 100)).shape == (100,)


async def test_limits_hold_as_for_windows(tmp_path: Path) -> None:
    bomb = encode(tmp_path / "bomb", silence(300.0), "ogg", "flac", 16_000)
    async with running(max_audio_s=60.0) as pool:
        with pytest.raises(InvalidAudioError, match="longer than"):
            await load(pool, bomb)
        with pytest.raises(AudioTooShortError):
            await load(pool, write_wav(tmp_path / "short", tone(0.05)))
    async with running(audio_timeout_s=0.01) as pool:
        with pytest.raises(InvalidAudioError, match="longer than"):
            await load(pool, write_wav(tmp_path / "slow", voice(120.0)))


async def test_short_clips_pass_a_long_file(
    pool: AudioPool, tmp_path: Path, long_file: Path
) -> None:
    clip = write_wav(tmp_path / "clip", voice(2.0))
    async with open_whole(pool, long_file) as audio:
        work = asyncio.create_task(audio.load())
        for _ in range(3):
            await load(pool, clip)
        assert not work.done(), "the long file was decoded before the clips"
        await work


async def test_another_uploads_death_costs_nothing(
    tmp_path: Path, long_file: Path, long_pcm: NDArray[np.int16]
) -> None:
    """Decoding begins anew in another worker; what was received is not received twice."""
    victim_file = write_wav(tmp_path / "victim", voice(100.0))
    async with running() as pool:
        _, undisturbed = await load(pool, long_file)
        async with (
            open_whole(pool, long_file) as audio,
            pool.open(victim_file, request_id="victim", timeout_s=PATIENCE_S) as victim,
        ):
            await until(lambda: audio.stream.n_received > 0)
            os.kill(await freeze_on(pool, victim), signal.SIGKILL)
            await audio.load()
            with pytest.raises(WorkerError, match="died on this upload"):
                await anext(victim)
            assert np.array_equal(await audio.read(0, audio.n_samples), long_pcm)
            assert audio.log_max == undisturbed.log_max


async def test_a_worker_that_dies_on_it_fails_it(long_file: Path) -> None:
    async with running() as pool:
        async with open_whole(pool, long_file) as audio:
            os.kill(await freeze_on(pool, audio.stream), signal.SIGKILL)
            with pytest.raises(WorkerError, match="died on this upload"):
                await audio.load()
        assert is_gone(audio)
        await until(lambda: [w.ready.is_set() for w in pool._workers] == [True])


async def test_a_client_that_leaves_frees_worker_and_file(pool: AudioPool, long_file: Path) -> None:
    workers = pids(pool)
    opened: list[WholeAudio] = []
    loading = asyncio.Event()

    async def work() -> None:
        async with open_whole(pool, long_file) as audio:
            opened.append(audio)
            await audio.load(lambda _: loading.set())
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await loading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (worker,) = pool._workers
    assert worker.streams == {}
    await until(lambda: worker.slot.get()[0] == 0)
    assert is_gone(opened[0])
    assert pids(pool) == workers


async def test_what_the_caller_refuses_ends_the_load(pool: AudioPool, long_file: Path) -> None:
    def refuse(_: float) -> None:
        raise OverloadedError("no room")

    with pytest.raises(OverloadedError, match="no room"):
        async with open_whole(pool, long_file) as audio:
            await audio.load(refuse)
    assert pool._workers[0].streams == {}


async def test_a_worker_that_cannot_be_had_in_time(long_file: Path) -> None:
    async with running() as pool:
        os.kill(pids(pool)[0], signal.SIGSTOP)
        with pytest.raises(DeadlineExceededError):
            async with pool.open_whole(long_file, request_id="r", timeout_s=0.1, n_mels=N_MELS):
                pass
        os.kill(pids(pool)[0], signal.SIGCONT)


async def test_a_full_disk_is_told_as_one(
    pool: AudioPool, long_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OverloadedError) as failure:
        await load(pool, long_file)
    assert failure.value.retry_after_s


@pytest.mark.parametrize("block", [1, 7, 10, 23])
def test_pieces_are_all_of_the_audio_in_order(block: int) -> None:
    pcm = np.arange(40, dtype=np.int16)
    pieces, found = Pieces(max_samples=10), []
    for start in range(0, 40, block):
        found += pieces.feed(pcm[start : start + block])
    found += pieces.finish()
    assert [(p.index, p.start_sample) for p in found] == [(0, 0), (1, 10), (2, 20), (3, 30)]
    assert np.array_equal(np.concatenate([p.pcm for p in found]), pcm)
    assert pieces.n_samples == 40
