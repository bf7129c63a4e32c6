"""Any upload becomes 16 kHz mono PCM of the right length, or a typed error."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import av
import numpy as np
import pytest

from cluster.common.errors import AudioTooShortError, InvalidAudioError
from cluster.common.messages import SAMPLE_RATE
from router.audio.audio_file import AudioFile
from router.audio.protocol import AudioLimits
from tests.support.audio.bombs_of_frames import id3, id3_frame
from tests.support.audio.sounds import (
    FORMATS,
    LIMITS,
    Pcm,
    cut,
    encode,
    encode_as,
    joined,
    silence,
    tone,
    write_video,
    write_wav,
)

# Samples by which a decoded length may differ: whole codec frames where the container cannot
# say how much of the last one is padding.
PADDED = {"mpga": 1152 * 2, "mpeg": 1152 * 2, "aac": 1024 * 3, "mp4": 1024, "m4a": 1024}


def decode(path: Path, limits: AudioLimits = LIMITS) -> Pcm:
    with closing(AudioFile(path, limits)) as file:
        return np.concatenate([*file.blocks()])


def loudest_hz(pcm: Pcm) -> float:
    spectrum = np.abs(np.fft.rfft(pcm[:SAMPLE_RATE].astype(np.float64)))
    return float(np.argmax(spectrum))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_decodes_to_its_length(name: str, tmp_path: Path) -> None:
    pcm = tone(3.0)
    decoded = decode(encode_as(name, tmp_path, pcm))
    assert decoded.dtype == np.int16
    slack = 4 + PADDED.get(name, 0) * SAMPLE_RATE // FORMATS[name][2]
    assert abs(decoded.shape[0] - pcm.shape[0]) <= slack
    assert loudest_hz(decoded) == pytest.approx(440, abs=1)


@pytest.mark.parametrize("name", ["flac", "mp3", "m4a", "opus", "webm", "wav"])
def test_a_sound_stays_where_it_was(name: str, tmp_path: Path) -> None:
    """Encoder delay and pre-skip are taken off: a click at 1 s is at 1 s."""
    pcm = joined(silence(1.0), tone(0.05, 2000), silence(1.0))
    decoded = decode(encode_as(name, tmp_path, pcm)).astype(np.int32)
    loud = np.flatnonzero(np.abs(decoded) > 3000)
    assert loud[0] == pytest.approx(1.0 * SAMPLE_RATE, abs=40)
    assert loud[-1] == pytest.approx(1.05 * SAMPLE_RATE, abs=60)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 32_000, 44_100, 48_000, 96_000])
def test_every_rate_keeps_every_sample(rate: int, tmp_path: Path) -> None:
    decoded = decode(encode(tmp_path / "upload", tone(2.5), "wav", "pcm_s16le", rate))
    assert abs(decoded.shape[0] - 2.5 * SAMPLE_RATE) <= 4
    assert np.abs(decoded[-160:].astype(np.int32)).max() > 4000, "the tail was lost"


@pytest.mark.parametrize("layout", ["mono", "stereo", "2.1", "quad", "5.0", "5.1", "7.1"])
@pytest.mark.parametrize("name", ["wav", "flac"])
def test_every_channel_count_mixes_to_mono(layout: str, name: str, tmp_path: Path) -> None:
    decoded = decode(encode_as(name, tmp_path, tone(1.0), layout))
    assert abs(decoded.shape[0] - SAMPLE_RATE) <= 4
    assert loudest_hz(decoded) == pytest.approx(440, abs=1)


@pytest.mark.parametrize("channels", [1, 3, 6, 9, 16, 32])
def test_channels_without_a_layout_mix_to_mono(channels: int, tmp_path: Path) -> None:
    pcm = np.repeat(tone(1.0)[:, None], channels, axis=1)
    (tmp_path / "upload").write_bytes(wav_header(pcm.nbytes, channels=channels) + pcm.tobytes())
    decoded = decode(tmp_path / "upload")
    assert decoded.shape[0] == SAMPLE_RATE
    assert loudest_hz(decoded) == pytest.approx(440, abs=1)


def test_pcm_that_needs_no_change_is_not_changed(tmp_path: Path) -> None:
    pcm = np.random.default_rng(0).integers(-32768, 32767, 50_000).astype(np.int16)
    assert np.array_equal(decode(write_wav(tmp_path / "upload", pcm)), pcm)


def test_a_live_recording_without_sizes_decodes(tmp_path: Path) -> None:
    live = encode(tmp_path / "upload", tone(2.0), "webm", "libopus", 48_000, options={"live": "1"})
    assert decode(live).shape[0] == pytest.approx(32_000, abs=330)


def test_the_sound_of_a_video_is_taken_and_must_be_there(tmp_path: Path) -> None:
    decoded = decode(write_video(tmp_path / "upload", tone(1.0)))
    assert decoded.shape[0] == pytest.approx(16_000, abs=1100)
    with pytest.raises(InvalidAudioError, match="no sound"):
        decode(write_video(tmp_path / "silent", None))


# ------------------------------------------------------------------------------ not audio

NOT_AUDIO: dict[str, bytes] = {
    "text": b"This is no audio at all, only a long sentence. " * 200,
    "one byte": b"R",
    "random": np.random.default_rng(3).bytes(300_000),
    "zeros": bytes(100_000),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(1000),
    "m3u8": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
    "dash": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>',
    "wav without data": b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0" + bytes(12),
    "riff that is no wave": b"RIFF\x24\0\0\0AVI LIST" + bytes(500),
    "ogg of nothing": b"OggS" + bytes(500),
    "mkv of nothing": b"\x1a\x45\xdf\xa3" + bytes(500),
    "id3 of nothing": b"ID3\x04\0\0\0\0\0\0" + bytes(5000),
    "flac of noise": b"fLaC" + np.random.default_rng(4).bytes(50_000),
    "mp4 of noise": b"\0\0\0\x18ftypM4A " + np.random.default_rng(5).bytes(50_000),
    "mp3 sync and noise": b"\xff\xfb\x90\x64" + np.random.default_rng(6).bytes(100_000),
    "aac sync and noise": b"\xff\xf1\x50\x80" + np.random.default_rng(7).bytes(100_000),
}


@pytest.mark.parametrize("name", NOT_AUDIO)
def test_what_is_not_audio_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "upload").write_bytes(NOT_AUDIO[name])
    with pytest.raises((InvalidAudioError, AudioTooShortError)):
        decode(tmp_path / "upload")


def test_the_message_lists_the_formats_like_openai(tmp_path: Path) -> None:
    (tmp_path / "upload").write_bytes(NOT_AUDIO["text"])
    with pytest.raises(InvalidAudioError) as refused:
        decode(tmp_path / "upload")
    assert refused.value.message.startswith("Invalid file format. Supported formats: ['flac', ")
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, None, None)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.09])
def test_too_short_is_its_own_error(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(AudioTooShortError, match=r"0\.1 seconds"):
        decode(write_wav(tmp_path / "upload", tone(seconds)))


def test_an_empty_file_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "upload").touch()
    with pytest.raises(AudioTooShortError):
        decode(tmp_path / "upload")
    with pytest.raises(AudioTooShortError, match="There is no audio in it"):
        decode(tmp_path / "upload", dataclasses.replace(LIMITS, min_audio_s=0.0))


# ------------------------------------------------------------------------------ truncated


@pytest.mark.parametrize("share", [0.3, 0.77, 0.95])
@pytest.mark.parametrize(
    ("muxer", "codec", "options", "message"),
    [
        ("flac", "flac", {}, "truncated"),
        ("mp4", "aac", {"movflags": "faststart"}, "truncated"),
        ("ipod", "alac", {"movflags": "faststart"}, "truncated"),
        ("mp4", "aac", {}, "Invalid file format"),  # its index was at the end
    ],
)
def test_a_file_that_holds_less_than_it_declares_is_refused(
    muxer: str, codec: str, options: dict[str, str], message: str, share: float, tmp_path: Path
) -> None:
    whole = encode(tmp_path / "upload", tone(12.0), muxer, codec, 44_100, options=options)
    assert decode(whole).shape[0] == pytest.approx(12 * SAMPLE_RATE, abs=400)
    with pytest.raises(InvalidAudioError, match=message):
        decode(cut(whole, share))


@pytest.mark.parametrize("name", ["mp3", "aac", "ogg", "opus", "webm", "mpeg", "wav"])
def test_of_others_what_is_left_of_a_truncated_file_is_decoded(name: str, tmp_path: Path) -> None:
    decoded = decode(cut(encode_as(name, tmp_path, tone(6.0)), 0.77))
    assert 3.9 < decoded.shape[0] / SAMPLE_RATE < 5.0


def test_a_pause_in_the_time_stamps_is_not_missing_audio(tmp_path: Path) -> None:
    """Recorders that can be paused write such MP4 files."""
    path = tmp_path / "upload"
    with (
        av.open(str(encode_as("mp4", tmp_path, tone(6.0)))) as whole,
        av.open(str(path), "w", format="mp4") as paused,
    ):
        stream = paused.add_stream_from_template(whole.streams.audio[0])
        for n, packet in enumerate(whole.demux(audio=0)):
            if packet.pts is not None and packet.dts is not None:
                packet.pts += (n > 100) * 20 * 44_100
                packet.dts += (n > 100) * 20 * 44_100
                packet.stream = stream
                paused.mux(packet)
    with closing(AudioFile(path, LIMITS)) as file:
        assert file.declared_s == pytest.approx(26.0, abs=0.1)
        n_samples = sum(block.shape[0] for block in file.blocks())
    assert n_samples == pytest.approx(6 * SAMPLE_RATE, abs=1024)


@pytest.mark.parametrize("name", ["mp3", "aac", "flac"])
def test_tags_before_the_audio_are_not_read(name: str, tmp_path: Path) -> None:
    """libav compares each text of one with all before it."""
    path = encode_as(name, tmp_path, tone(1.0))
    plain = decode(path)
    tag = id3(id3_frame(b"TXXX", b"\0name\0text"))
    path.write_bytes(tag + tag + path.read_bytes())
    assert np.array_equal(decode(path), plain)
    with closing(AudioFile(path, LIMITS)) as file:
        assert file._container is not None
        assert "name" not in file._container.metadata


@pytest.mark.parametrize("chunk", [bytes(8), b"junk\0\0\0\0"])
def test_what_follows_the_audio_of_a_wav_file_does_not_matter(chunk: bytes, tmp_path: Path) -> None:
    """Recorders that reserve room leave zeros there, which read as empty chunks."""
    path = write_wav(tmp_path / "upload", tone(1.0))
    plain = decode(path)
    path.write_bytes(path.read_bytes() + chunk * 25_000)
    assert np.array_equal(decode(path), plain)


# ---------------------------------------------------------------------- forged and too much


def wav_header(data_bytes: int, rate: int = SAMPLE_RATE, channels: int = 1) -> bytes:
    block = 2 * channels & 0xFFFF
    riff = struct.pack("<4sI4s", b"RIFF", (data_bytes + 36) & 0xFFFFFFFF, b"WAVE")
    form = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * block & 0xFFFFFFFF, block, 16
    )
    return riff + form + struct.pack("<4sI", b"data", data_bytes)


@pytest.mark.parametrize("declared", [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 10**9, 0])
def test_a_wav_written_to_a_pipe_gives_what_is_there(declared: int, tmp_path: Path) -> None:
    pcm = joined(silence(3.0), tone(2.0))
    (tmp_path / "upload").write_bytes(wav_header(declared) + pcm.tobytes())
    with closing(AudioFile(tmp_path / "upload", LIMITS)) as file:
        assert file.declared_s is None or file.declared_s < 5.1
        assert sum(block.shape[0] for block in file.blocks()) == 80_000


ABSURD = [{"rate": rate} for rate in (0, 1, 100, 3_000, 1_000_000, 0x7FFFFFFF, 0xFFFFFFFF)]
ABSURD += [{"channels": channels} for channels in (0, 33, 255, 65_535)]


@pytest.mark.parametrize("header", ABSURD)
def test_absurd_rates_and_channel_counts_are_refused(
    header: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "upload").write_bytes(wav_header(640_000, **header) + bytes(640_000))
    with pytest.raises((InvalidAudioError, AudioTooShortError)):
        decode(tmp_path / "upload")


@pytest.fixture(scope="module")
def hour_of_silence(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("silence") / "hour"
    return encode(path, silence(3600.0), "flac", "flac", 16_000).read_bytes()


def without_length(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    path.write_bytes(data)


@pytest.mark.parametrize("forge", [None, without_length])
def test_a_bomb_is_stopped_while_decoding(
    forge: Callable[[Path], None] | None, hour_of_silence: bytes, tmp_path: Path
) -> None:
    """Less than a megabyte that unfold to an hour: no more than the limit is decoded."""
    assert len(hour_of_silence) < 1_000_000
    bomb = tmp_path / "upload"
    bomb.write_bytes(hour_of_silence)
    if forge:
        forge(bomb)
    n_samples = 0
    limits = dataclasses.replace(LIMITS, max_audio_s=60.0)
    with pytest.raises(InvalidAudioError, match="longer than") as refused:  # noqa: PT012, SIM117
        with closing(AudioFile(bomb, limits)) as file:
            for block in file.blocks():
                n_samples += block.shape[0]
    assert n_samples <= 60 * SAMPLE_RATE
    assert refused.value.code == "audio_too_long"


def test_decoded_bytes_are_limited_as_well(tmp_path: Path) -> None:
    path = encode(tmp_path / "upload", tone(0.9), "wav", "pcm_s16le", 96_000, "7.1")
    with pytest.raises(InvalidAudioError, match="longer than"):
        decode(path, dataclasses.replace(LIMITS, max_audio_s=1.0))


def test_a_codec_outside_the_list_is_refused(tmp_path: Path) -> None:
    path = encode(tmp_path / "upload", tone(1.0), "matroska", "wavpack", 16_000)
    with pytest.raises(InvalidAudioError):
        decode(path)


def test_damage_in_the_middle_is_played_over(tmp_path: Path) -> None:
    path = encode_as("mp3", tmp_path, tone(20.0))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 300] = bytes(300)
    path.write_bytes(data)
    assert decode(path).shape[0] == pytest.approx(20 * SAMPLE_RATE, abs=4000)


def test_a_codec_that_libav_does_not_know_is_refused(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "unknown.wav", tone(1.0))
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 20, 0x7777)
    path.write_bytes(data)
    with pytest.raises(InvalidAudioError, match="codec is not supported"):
        decode(path)


def test_a_length_over_the_limit_is_believed_only_of_containers_that_state_it(
    tmp_path: Path,
) -> None:
    """Of others it comes from time stamps, and one damaged stamp makes seconds into days."""
    limits = dataclasses.replace(LIMITS, max_audio_s=1.0)
    with pytest.raises(InvalidAudioError, match="longer than"):
        AudioFile(encode_as("m4a", tmp_path, tone(4.0)), limits)
    path = encode_as("mpeg", tmp_path, tone(4.0))
    with closing(AudioFile(path, LIMITS)) as file:
        assert file.declared_s == pytest.approx(4.0, abs=0.1)
    with closing(AudioFile(path, limits)) as file:
        assert file.declared_s is None
    with pytest.raises(InvalidAudioError, match="longer than"):
        decode(path, limits)
