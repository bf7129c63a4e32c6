"""An upload that is opened whole can be read in any order, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest
import whisper.audio
from numpy.typing import NDArray

from cluster.common.errors import OverloadedError, WorkerError
from router.audio.pool import AudioPool
from router.audio.stream import WholeAudio
from router.audio.windows import Pieces
from router.audio.worker import MelPeak
from tests.support.audio.audio_pools import freeze_on, pids, request, running, until
from tests.support.audio.sounds import joined, silence, voice, write_wav
from tests.support.references.hugging_face import make_pcm

pytestmark = pytest.mark.asyncio(loop_scope="module")  # that of the shared `pool`

N_MELS = 80


@pytest.fixture(scope="module")
def long_pcm() -> NDArray[np.int16]:
    return joined(silence(12.0), voice(140.0), silence(31.77))


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory, long_pcm: NDArray[np.int16]) -> Path:
    return write_wav(tmp_path_factory.mktemp("audio") / "long", long_pcm)


def open_whole(pool: AudioPool, path: Path) -> AbstractAsyncContextManager[WholeAudio]:
    return pool.open_whole(path, request(), n_mels=N_MELS)


async def load(pool: AudioPool, path: Path) -> tuple[NDArray[np.int16], WholeAudio]:
    async with open_whole(pool, path) as audio:
        await audio.load(lambda _: None)
        return await audio.read(0, audio.n_samples), audio


async def test_every_sample_can_be_read_silence_included(
    pool: AudioPool, long_file: Path, long_pcm: NDArray[np.int16]
) -> None:
    found_s: list[float] = []
    async with open_whole(pool, long_file) as audio:
        assert audio.expected_s == pytest.approx(183.77)
        await audio.load(found_s.append)
        (worker,) = pool._workers
        assert worker.streams == {}, "free, since a file is decoded faster than transcribed"
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
    assert audio.result.log_max == pytest.approx(reference(long_pcm), abs=1e-5)


async def test_another_uploads_death_costs_nothing(
    tmp_path: Path, long_file: Path, long_pcm: NDArray[np.int16]
) -> None:
    victim_file = write_wav(tmp_path / "victim", voice(100.0))
    async with running() as pool:
        _, undisturbed = await load(pool, long_file)
        async with (
            open_whole(pool, long_file) as audio,
            pool.open(victim_file, request()) as victim,
        ):
            await until(lambda: audio.n_received > 0)
            os.kill(await freeze_on(pool, victim), signal.SIGKILL)
            await audio.load(lambda _: None)
            with pytest.raises(WorkerError, match="died on this upload"):
                await anext(victim)
            assert np.array_equal(await audio.read(0, audio.n_samples), long_pcm)
            assert audio.result.log_max == undisturbed.result.log_max


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
    await until(lambda: worker.slot.get() == 0)
    assert opened[0]._file.closed, "it has no name, so this deletes it"
    assert pids(pool) == workers


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


# ---- the peak that is found block by block is the maximum of openai-whisper's spectrogram ----


def peak_of(pcm: NDArray[np.int16], block: int, n_mels: int = 80) -> float:
    peak = MelPeak(n_mels)
    for start in range(0, pcm.shape[0], block):
        peak.feed(pcm[start : start + block])
    return peak.finish()


def reference(pcm: NDArray[np.int16], n_mels: int = 80) -> float:
    floats = pcm.astype(np.float32) / 32_768
    scaled = whisper.audio.log_mel_spectrogram(floats, n_mels, padding=whisper.audio.N_SAMPLES)
    return float(scaled.max()) * 4 - 4


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("block", [1, 160, 199, 7_777, 10**9])
def test_blocks_of_any_size_give_the_references_maximum(block: int, n_mels: int) -> None:
    pcm = make_pcm(0.05 if block == 1 else 7.3, seed=5)
    assert peak_of(pcm, block, n_mels) == pytest.approx(reference(pcm, n_mels), abs=1e-5)


@pytest.mark.parametrize("n_samples", [1, 40, 199, 200, 201, 359, 400, 401])
def test_files_shorter_than_a_frame(n_samples: int) -> None:
    pcm = make_pcm(1.0, seed=6)[8_000 : 8_000 + n_samples]
    assert peak_of(pcm, 64) == pytest.approx(reference(pcm), abs=1e-5)


@pytest.mark.parametrize("at", [0, 3, 150, -1, -150, -161])
def test_a_click_at_an_edge_counts_as_in_the_reference(at: int) -> None:
    """Only there do the reflection before the file and the zeros behind it matter."""
    pcm = np.zeros(32_077, np.int16)
    pcm[at] = 30_000
    assert peak_of(pcm, 8_000) == pytest.approx(reference(pcm), abs=1e-5)


def test_silence_is_at_the_floor() -> None:
    assert math.isclose(peak_of(np.zeros(16_000, np.int16), 8_000), -10.0)
