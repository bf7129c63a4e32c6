"""A channel is what it is alone, and equal and silent channels are found."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cluster.common.errors import AudioTooShortError, InvalidAudioError, InvalidRequestError
from cluster.common.messages import SAMPLE_RATE
from router.audio.audio_file import AudioFile
from router.audio.protocol import Finished
from router.audio.worker import survey
from tests.support.audio.sounds import LIMITS, Pcm, encode, joined, silence, tone, voice, write_wav

CODECS = {
    "wav": ("wav", "pcm_s16le", 16_000, None),
    "wav24": ("wav", "pcm_s24le", 48_000, None),
    "mulaw": ("wav", "pcm_mulaw", 8_000, None),
    "alaw": ("wav", "pcm_alaw", 8_000, None),
    "flac": ("flac", "flac", 16_000, None),
    "mp3": ("mp3", "libmp3lame", 44_100, 64_000),
    "opus": ("ogg", "libopus", 48_000, 48_000),
}
AGENT = joined(voice(2.0), silence(2.0), voice(1.0))
CALLER = joined(silence(2.2), np.roll(voice(1.6), 9_000), silence(1.2))


def stereo(path: Path, left: Pcm, right: Pcm, codec: str = "wav") -> Path:
    n_samples = max(left.shape[0], right.shape[0])
    padded = [np.pad(pcm, (0, n_samples - pcm.shape[0])) for pcm in (left, right)]
    muxer, encoder, rate, bit_rate = CODECS[codec]
    return encode(path, np.stack(padded), muxer, encoder, rate, "stereo", bit_rate=bit_rate)


def channels_of(path: Path) -> tuple[int | None, ...]:
    (*_, last) = survey(path, LIMITS)
    assert isinstance(last, Finished)
    return last.channels


def decode(path: Path, channel: int | None = None) -> Pcm:
    with closing(AudioFile(path, LIMITS)) as file:
        return np.concatenate([*file.blocks(channel)])


@pytest.mark.parametrize("codec", ["wav", "wav24", "mulaw", "alaw", "flac"])
def test_a_channel_is_what_it_is_as_a_file_of_its_own(codec: str, tmp_path: Path) -> None:
    muxer, encoder, rate, _ = CODECS[codec]
    both = stereo(tmp_path / "both", AGENT, CALLER, codec)
    for channel, pcm in enumerate((AGENT, CALLER)):
        alone = encode(tmp_path / f"{channel}", pcm, muxer, encoder, rate)
        assert np.array_equal(decode(both, channel), decode(alone))


@pytest.mark.parametrize("codec", ["wav", "alaw", "mp3", "opus"])
def test_channels_of_a_call_are_two(codec: str, tmp_path: Path) -> None:
    assert channels_of(stereo(tmp_path / "call", AGENT, CALLER, codec)) == (0, 1)


@pytest.mark.parametrize(
    ("codec", "gain"),
    [("wav", 1.0), ("wav24", -0.7), ("mulaw", 0.3), ("mp3", 1.0), ("mp3", 0.3), ("opus", -0.7)],
)
def test_mono_in_stereo_is_one_with_any_gain_and_codec(
    codec: str, gain: float, tmp_path: Path
) -> None:
    hiss = np.random.default_rng(0).normal(0, 30, 8_000).astype(np.int16)  # a codec's first noise
    pcm = joined(hiss, AGENT)
    quieter = (gain * pcm).astype(np.int16)
    assert channels_of(stereo(tmp_path / "mono", pcm, quieter, codec)) == (0, 0)


@pytest.mark.parametrize("codec", ["mulaw", "mp3"])
def test_a_word_in_one_channel_only_keeps_both(codec: str, tmp_path: Path) -> None:
    word = joined(silence(2.5), np.roll(voice(0.4), 5_000), silence(2.1))
    more = AGENT + word
    assert channels_of(stereo(tmp_path / "word", AGENT, more, codec)) == (0, 1)
    n_samples = min(AGENT.shape[0], CALLER.shape[0])
    agent, caller = (pcm[:n_samples].astype(np.float64) for pcm in (AGENT, CALLER))
    leaks = [(a + 0.3 * b).astype(np.int16) for a, b in ((agent, caller), (caller, agent))]
    assert channels_of(stereo(tmp_path / "leaks", *leaks, codec)) == (0, 1)


def test_a_quiet_word_behind_a_leak_keeps_both(tmp_path: Path) -> None:
    second = (0.005 * AGENT + 0.005 * CALLER).astype(np.int16)
    assert channels_of(stereo(tmp_path / "quiet", AGENT, second)) == (0, 1)


def test_silent_channels_are_none(tmp_path: Path) -> None:
    idle = np.random.default_rng(0).integers(-8, 9, AGENT.shape[0]).astype(np.int16)
    assert channels_of(stereo(tmp_path / "a", silence(5.0), AGENT)) == (None, 1)
    assert channels_of(stereo(tmp_path / "b", AGENT, idle, "mulaw")) == (0, None)
    assert channels_of(stereo(tmp_path / "c", silence(1.0), silence(1.0))) == (None, None)


def test_more_channels_than_two(tmp_path: Path) -> None:
    path = tmp_path / "six"
    planes = np.stack([AGENT[:16_000], tone(1.0), AGENT[:16_000] // 2, silence(1.0)])
    header = bytearray(write_wav(path, silence(0.1)).read_bytes()[:44])
    header[22:24] = len(planes).to_bytes(2, "little")  # channels
    header[28:32] = (2 * len(planes) * SAMPLE_RATE).to_bytes(4, "little")
    header[32:34] = (2 * len(planes)).to_bytes(2, "little")
    header[40:44] = planes.nbytes.to_bytes(4, "little")
    path.write_bytes(bytes(header) + planes.T.tobytes())
    assert channels_of(path) == (0, 1, 0, None)
    assert np.array_equal(decode(path, 1), tone(1.0))


def test_one_channel_has_none_to_separate(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        channels_of(write_wav(tmp_path / "mono", AGENT))
    assert (refused.value.param, refused.value.code) == ("channels", "single_channel")


def test_a_survey_keeps_the_limits_on_length(tmp_path: Path) -> None:
    with pytest.raises(AudioTooShortError):
        channels_of(stereo(tmp_path / "short", AGENT[:800], CALLER[:800]))
    path = stereo(tmp_path / "call", AGENT, CALLER)
    with pytest.raises(InvalidAudioError, match="number of channels changes"):
        decode(path, 2)
