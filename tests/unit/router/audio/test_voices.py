"""The speakers of an upload: stretches of speech, errors of references, and a worker that dies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.common.errors import InvalidAudioError
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.audio.audio_file import AudioFile
from router.audio.cutter import WindowCutter
from router.audio.embedding import SpeakerNetwork, windows_of
from router.audio.protocol import AudioLimits, Finished, SpeakerSearch
from router.audio.vad import SharedStream, SpeechDetector
from router.audio.voices import Heard, Voices
from tests.support.audio.sounds import joined, silence, write_wav
from tests.support.audio.speech import pcm_of
from tests.support.speaker_networks import write_network
from tests.unit.router.audio.test_clustering import result

Spans = list[tuple[int, int]]
LIMITS = AudioLimits(2**26, 3600.0, 0.1, 60.0, 2**30)


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Voices:
    model = write_network(tmp_path_factory.mktemp("model") / "voices.onnx")
    return Voices(SpeechDetector(), SpeakerNetwork(model), LIMITS)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 s of one bundled recording, a pause, and the other."""
    pcm = joined(pcm_of("long")[: 12 * SAMPLE_RATE], silence(1.0), pcm_of("short"))
    return write_wav(tmp_path_factory.mktemp("talk") / "talk.wav", pcm)


def stretches(voices: Voices, pcm: Pcm, piece: int, shared: SharedStream | None = None) -> Spans:
    heard = Heard(voices.detector, voices.network, shared)
    for at in range(0, pcm.shape[0], piece):
        list(heard.feed(pcm[at : at + piece]))
    vectors = result(heard.finish())
    spans = [(one.start, one.end) for one in heard.stretches]
    windows = [features for start, end in spans for _, features in windows_of(pcm[start:end])]
    alone = [voices.network.embed([features]) for features in windows]
    assert np.allclose(vectors, np.concatenate(alone), atol=1e-4), "vectors of other samples"
    return spans


def test_stretches_do_not_depend_on_the_pieces(voices: Voices) -> None:
    pcm = joined(pcm_of("medium")[: 15 * SAMPLE_RATE], silence(2.0))
    whole = stretches(voices, pcm, pcm.shape[0])
    assert whole == stretches(voices, pcm, 7_001)
    assert len(whole) > 2
    assert all(end <= start for (_, end), (start, _) in pairwise(whole))


@pytest.mark.parametrize("seconds", [15, 60])
def test_the_detector_hears_a_file_once_for_windows_and_speakers(
    voices: Voices, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    pcm = joined(pcm_of("long"), silence(1.0), pcm_of("medium"))[: seconds * SAMPLE_RATE]
    want = stretches(voices, pcm, pcm.shape[0])
    n_runs: list[int] = []
    run = voices.detector.run
    monkeypatch.setattr(
        SpeechDetector, "run", lambda _, *state: n_runs.append(len(state[0])) or run(*state)
    )
    cutter = WindowCutter(voices.detector)
    alone = [*cutter.feed(pcm), *cutter.finish()]
    n_alone = sum(n_runs)
    n_runs.clear()
    shared = SharedStream(voices.detector)
    cutter = WindowCutter(voices.detector, shared=shared)
    half = pcm.shape[0] // 2
    both: list[Any] = [*cutter.feed(pcm[:half])]
    found = stretches(voices, pcm, half + 1, shared)
    both += [*cutter.feed(pcm[half:]), *cutter.finish()]
    windows = [(one.start_sample, one.n_samples, one.speech) for one in both if one]
    assert windows == [(one.start_sample, one.n_samples, one.speech) for one in alone if one]
    assert found == want
    assert sum(n_runs) == n_alone


def test_a_search_tells_turns_and_no_vectors(voices: Voices, talk: Path) -> None:
    events = [
        event for event in voices.turns_of(talk, SpeakerSearch(threshold=0.5)) if event is not None
    ]
    _, last = events
    assert isinstance(last, Finished)
    assert last.voice is None
    turns = last.turns
    assert turns[0][2] == 0
    assert all(start < end for start, end, _ in turns)
    assert all(one[1] <= other[0] for one, other in pairwise(turns))


def test_of_a_reference_that_is_too_long_the_rest_is_not_decoded(
    voices: Voices, talk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, n_samples = write_wav(tmp_path / "hour.wav", silence(600.0)), 0
    blocks = AudioFile.blocks

    def counted(file: AudioFile) -> Iterator[Pcm]:
        nonlocal n_samples
        for pcm in blocks(file):
            n_samples += len(pcm)
            yield pcm

    monkeypatch.setattr(AudioFile, "blocks", counted)
    with pytest.raises(InvalidAudioError, match=r"1\.2 to 10 s"):
        list(voices.turns_of(talk, SpeakerSearch(references=(("Ann", str(path)),))))
    assert n_samples < 30 * SAMPLE_RATE, "with the talk of 18 s, if that came first"


@pytest.mark.parametrize(
    ("pcm", "reason"),
    [
        (pcm_of("short")[:SAMPLE_RATE], r"1\.2 to 10 s"),
        (pcm_of("short")[:100], r"1\.2 to 10 s"),
        (np.tile(pcm_of("short"), 3), r"1\.2 to 10 s"),
        (silence(2.0), "no speech"),
        (None, "cannot be read"),
    ],
    ids=["short", "tiny", "long", "silent", "text"],
)
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
