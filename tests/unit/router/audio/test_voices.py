"""The speakers of an upload: stretches of speech, errors of references, and a worker that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.common.errors import InvalidAudioError, WorkerError
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.settings import RouterSettings, SpeakerSettings
from router.audio.pool import AudioPool
from router.audio.protocol import AudioLimits, Finished, Opened, SpeakerSearch, TurnsFound
from router.audio.vad import SpeechDetector
from router.audio.voices import SpeechStretches, Voices
from router.diarization import MAX_SEARCHES, find_turns, name_of
from router.interface import RequestContext
from router.speakers.embedding import SpeakerNetwork
from router.speakers.options import SpeakerOptions
from tests.support.audio.audio_pools import freeze_on, until
from tests.support.audio.sounds import joined, silence, write_wav
from tests.support.audio.speech import pcm_of
from tests.support.speaker_networks import write_network

LIMITS = AudioLimits(2**26, 3600.0, 0.1, 60.0, 2**30, speaker_threshold=0.5)


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Voices:
    model = write_network(tmp_path_factory.mktemp("model") / "voices.onnx")
    return Voices(SpeechDetector(), SpeakerNetwork(model), LIMITS)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 s of one bundled recording, a pause, and the other."""
    pcm = joined(pcm_of("long")[: 12 * SAMPLE_RATE], silence(1.0), pcm_of("short"))
    return write_wav(tmp_path_factory.mktemp("talk") / "talk.wav", pcm)


def stretches(detector: SpeechDetector, pcm: Pcm, piece: int) -> list[tuple[int, int]]:
    speech = SpeechStretches(detector)
    found: list[tuple[int, Pcm]] = []
    for at in range(0, pcm.shape[0], piece):
        found += speech.feed(pcm[at : at + piece])
    found += speech.finish()
    for start, samples in found:
        assert np.array_equal(samples, pcm[start : start + samples.shape[0]])
    return [(start, start + samples.shape[0]) for start, samples in found]


def test_stretches_do_not_depend_on_the_pieces(voices: Voices) -> None:
    pcm = joined(pcm_of("medium")[: 15 * SAMPLE_RATE], silence(2.0))
    whole = stretches(voices.detector, pcm, pcm.shape[0])
    assert whole == stretches(voices.detector, pcm, 7_001)
    assert len(whole) > 2
    assert all(end <= start for (_, end), (start, _) in pairwise(whole))


def test_a_search_tells_turns_and_no_vectors(voices: Voices, talk: Path) -> None:
    events = [event for event in voices.turns_of(talk, SpeakerSearch()) if event is not None]
    kinds = [type(event) for event in events]
    assert kinds == [Opened, TurnsFound, Finished]
    turns = events[1].turns
    assert turns[0][2] == 0
    assert all(start < end for start, end, _ in turns)
    assert all(one[1] <= other[0] for one, other in pairwise(turns))


def references() -> list[Any]:
    speech = pcm_of("short")
    refused = (
        ("short", speech[:SAMPLE_RATE], r"1\.2 to 10 s"),
        ("tiny", speech[:100], r"1\.2 to 10 s"),
        ("long", joined(speech, speech, speech), r"1\.2 to 10 s"),
        ("silent", silence(2.0), "no speech"),
        ("text", None, "cannot be read"),
    )
    return [pytest.param(pcm, reason, id=name) for name, pcm, reason in refused]


@pytest.mark.parametrize(("pcm", "reason"), references())
def test_a_reference_of_no_use_is_refused_by_name(
    voices: Voices, talk: Path, tmp_path: Path, pcm: Pcm | None, reason: str
) -> None:
    path = tmp_path / "reference"
    if pcm is None:
        path.write_text("no audio " * 99)
    else:
        write_wav(path, pcm)
    search = SpeakerSearch(references=(("Ann", str(path)),))
    with pytest.raises(InvalidAudioError, match=f"'Ann'.*{reason}") as refused:
        list(voices.turns_of(talk, search))
    assert refused.value.param == "known_speaker_references"


def context() -> RequestContext:
    return RequestContext.unlimited("r", 60.0)


def options(**given: Any) -> SpeakerOptions:
    return replace(SpeakerOptions(by="voice"), **given)


def contents(search: SpeakerSearch) -> list[bytes]:
    return [Path(file).read_bytes() for _, file in search.references]


class PlayedPool:
    """Fails `n_deaths` searches, and notes what it was asked and which files were there."""

    def __init__(self, n_deaths: int = 0) -> None:
        self.n_deaths = n_deaths
        self.searches: list[SpeakerSearch] = []
        self.heard: list[bytes] = []

    async def survey(self, path: Path, _: RequestContext, speakers: SpeakerSearch) -> Any:
        self.searches.append(speakers)
        self.heard = contents(speakers)
        if len(self.searches) <= self.n_deaths:
            raise WorkerError("the audio worker died")
        turns = [(0, 16_000, 1), (16_000, 24_000, 0), (32_000, 48_000, 2)]
        return SimpleNamespace(turns=turns)


async def test_turns_have_names_and_leave_no_recording_behind() -> None:
    pool: Any = PlayedPool(n_deaths=1)
    asked = options(names=("A",), references=(b"sound",), num_speakers=3)
    turns = await find_turns(pool, Path("x"), asked, context())
    assert [(turn.start, turn.end, turn.speaker) for turn in turns] == [
        (0.0, 1.0, "B"),
        (1.0, 1.5, "A"),
        (2.0, 3.0, "C"),
    ]
    assert pool.heard == [b"sound"]
    search = pool.searches[-1]
    assert (search.least, search.most) == (3, 3)
    with pytest.raises(FileNotFoundError):
        contents(search)


async def test_searches_end_after_deaths() -> None:
    pool: Any = PlayedPool(n_deaths=9)
    with pytest.raises(WorkerError):
        await find_turns(pool, Path("x"), options(), context())
    assert len(pool.searches) == MAX_SEARCHES


def test_unknown_speakers_have_letters() -> None:
    assert [name_of(i, ()) for i in (0, 25, 26, 27)] == ["A", "Z", "AA", "AB"]
    assert [name_of(i, ("B",)) for i in (0, 1, 2)] == ["B", "A", "C"]


@pytest.mark.slow
async def test_a_killed_worker_costs_a_search(tmp_path: Path, talk: Path) -> None:
    model = write_network(tmp_path / "voices.onnx")
    settings = RouterSettings(audio_workers=1)
    pool = AudioPool(settings, speakers=SpeakerSettings(model=str(model), threshold=0.5))
    await pool.start()
    try:
        want = await find_turns(pool, talk, options(), context())
        again = asyncio.create_task(find_turns(pool, talk, options(), context()))
        await until(lambda: any(worker.streams for worker in pool._workers))
        (stream,) = pool._workers[0].streams.values()
        os.kill(await freeze_on(pool, stream), signal.SIGKILL)
        assert await again == want
    finally:
        await pool.close()
