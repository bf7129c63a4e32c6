"""The voices of a live session: who a piece of speech is of, and when that is not certain."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.settings import RouterSettings, SpeakerSettings
from router.audio.pool import AudioPool
from router.audio.protocol import Voice
from router.speakers.live import SessionVoices, hear
from tests.support.audio.sounds import silence
from tests.support.audio.speech import pcm_of
from tests.support.speaker_networks import write_network


async def played(pcm: Pcm) -> Voice | None:
    """The first sample is the voice, and none is 0; samples are tenths of a second."""
    if not pcm[0]:
        return None
    voice = np.eye(4, dtype=np.float32)[pcm[0]] + np.float32(0.1)
    n_samples = round(pcm.shape[0] * SAMPLE_RATE / 10)
    return tuple((voice / np.linalg.norm(voice)).tolist()), n_samples


async def told(*pieces: tuple[int, float], threshold: float = 0.15) -> list[str | None]:
    session = SessionVoices(played, threshold)
    return await session.speakers_of(
        np.full(round(10 * long), voice, np.int16) for voice, long in pieces
    )


async def test_voices_have_letters_as_they_appear() -> None:
    assert await told((2, 2.0), (1, 3.0), (2, 9.0), (3, 1.5), (1, 2.0)) == list("ABACB")


async def test_pieces_are_heard_at_the_same_time() -> None:
    """Where audio workers are busy each takes seconds, in which no words come."""
    both = asyncio.Barrier(2)

    async def hear(pcm: Pcm) -> Voice | None:
        await both.wait()
        return await played(pcm)

    pieces = [np.full(20, voice, np.int16) for voice in (1, 2)]
    async with asyncio.timeout(10):
        assert await SessionVoices(hear, 0.15).speakers_of(pieces) == ["A", "B"]


async def test_a_larger_threshold_takes_other_voices_for_one() -> None:
    pieces = (1, 2.0), (2, 2.0)  # their cosine is 0.19
    assert [await told(*pieces, threshold=one) for one in (0.3, 0.9)] == [["A", "B"], ["A", "A"]]


async def test_a_new_voice_has_no_name_before_it_spoke_long_enough() -> None:
    found = await told((1, 1.4), (1, 1.6), (1, 0.5), (2, 0.5), (0, 3.0))
    assert found == [None, "A", "A", None, None]


async def test_a_session_goes_on_without_speakers_where_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for make in ("TemporaryFile", "NamedTemporaryFile"):
        monkeypatch.setattr(tempfile, make, full)
    pool: Any = None  # is not asked
    assert await hear(pool, silence(2.0)) is None


@pytest.mark.slow
async def test_an_audio_worker_gives_the_voice_of_a_piece(tmp_path: Path) -> None:
    model = str(write_network(tmp_path / "voices.onnx", size=16))
    settings = RouterSettings(audio_workers=1)
    pool = AudioPool(settings, speakers=SpeakerSettings(model=model, threshold=0.5))
    await pool.start()
    try:
        voice = await hear(pool, pcm_of("medium")[: 4 * SAMPLE_RATE])
        assert voice is not None
        vector, n_samples = voice
        assert 2 * SAMPLE_RATE < n_samples <= 4 * SAMPLE_RATE
        assert len(vector) == 16
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-3)
        for nothing in (silence(2.0), pcm_of("medium")[:10]):
            assert await hear(pool, nothing) is None
    finally:
        await pool.close()
