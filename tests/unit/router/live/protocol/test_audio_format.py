"""Audio that comes in pieces of any length gives the samples of the whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.live.protocol.audio_format import AudioFormat, StreamDecoder

FORMATS = [AudioFormat(), AudioFormat("pcm", 16_000), AudioFormat("pcm", 44_100)]
G711 = [AudioFormat("pcmu", 8_000), AudioFormat("pcma", 8_000)]


def decoded(form: AudioFormat, pieces: list[bytes]) -> np.ndarray:
    decoder = StreamDecoder(form)
    found = [pcm for piece in pieces for pcm in decoder.decode(piece)]
    return np.concatenate([*found, *decoder.flush(), np.zeros(0, np.int16)])


@settings(max_examples=40, deadline=None)
@given(form=st.sampled_from(FORMATS + G711), cuts=st.lists(st.integers(0, 20_000), max_size=8))
def test_pieces_give_what_the_whole_gives(form: AudioFormat, cuts: list[int]) -> None:
    audio = np.random.default_rng(1).integers(-9000, 9000, 10_000).astype("<i2").tobytes()
    edges = [0, *sorted(cuts), len(audio)]
    pieces = [audio[a:b] for a, b in itertools.pairwise(edges)]
    whole = decoded(form, [audio])
    assert np.array_equal(decoded(form, pieces), whole)
    samples = len(audio) / (2 if form.encoding == "pcm" else 1)
    assert abs(len(whole) - samples * 16_000 / form.rate) <= 1


@pytest.mark.parametrize("form", FORMATS)
def test_a_tone_stays_a_tone_and_silence_stays_silent(form: AudioFormat) -> None:
    seconds = np.arange(form.rate) / form.rate
    tone = np.round(8000 * np.sin(2 * np.pi * 440 * seconds)).astype("<i2")
    found = decoded(form, [tone.tobytes()])[1000:-1000]
    expected = 8000 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)[1000:-1000]
    assert np.abs(found[: len(expected)] - expected[: len(found)]).max() < 20
    assert not decoded(form, [bytes(2 * form.rate)]).any()


def test_g711_s_codes_are_the_standard_s() -> None:
    """The loudest and the softest code of each law (ITU-T G.711, in 16 bits)."""
    upsampled = decoded(AudioFormat("pcmu", 8_000), [bytes([0x00]) * 4000])
    assert abs(int(np.median(upsampled)) + 32_124) <= 2
    assert not decoded(AudioFormat("pcmu", 8_000), [bytes([0xFF]) * 4000]).any()
    loudest = decoded(AudioFormat("pcma", 8_000), [bytes([0xAA]) * 4000])
    assert abs(int(np.median(loudest)) - 32_256) <= 2


@pytest.mark.parametrize("form", FORMATS)
def test_a_sample_that_a_commit_splits_is_the_first_of_what_follows(form: AudioFormat) -> None:
    audio = np.random.default_rng(1).integers(-9000, 9000, 10_000).astype("<i2").tobytes()
    decoder = StreamDecoder(form)
    found = [*decoder.decode(audio[:9999]), *decoder.flush()]
    assert np.array_equal(np.concatenate(found), decoded(form, [audio[:9998]]))
    found = [*decoder.decode(audio[9999:]), *decoder.flush()]
    assert np.array_equal(np.concatenate(found), decoded(form, [audio[9998:]]))
