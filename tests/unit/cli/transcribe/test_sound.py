"""What comes from a microphone, from standard input or from a file is the sound that was there."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.cli.transcribe.job import STDIN
from cluster.cli.transcribe.live import open_sound
from cluster.common.errors import InvalidAudioError
from cluster.common.messages import Pcm
from tests.support.audio.sounds import write_wav
from tests.support.references.hugging_face import make_pcm

RATE = 16_000
FeedStdin = Callable[[bytes, int], None]


def heard(source: str, rate: int = RATE, *, raw: bool = False) -> Pcm:
    return np.concatenate(list(open_sound(source, rate, threading.Event(), raw=raw)))


@pytest.fixture
def feed_stdin() -> Iterator[FeedStdin]:
    """Makes bytes this process's standard input, in writes of a size that the test chooses."""
    saved = os.dup(0)
    writers: list[threading.Thread] = []

    def feed(content: bytes, size: int) -> None:
        ours, theirs = os.pipe()
        os.dup2(ours, 0)
        os.close(ours)

        def write() -> None:
            with os.fdopen(theirs, "wb", buffering=0) as pipe:
                for at in range(0, len(content), size):
                    pipe.write(content[at : at + size])

        writers.append(threading.Thread(target=write))
        writers[-1].start()

    yield feed
    os.dup2(saved, 0)
    os.close(saved)
    for writer in writers:
        writer.join(10)


def test_raw_samples_are_whole_though_their_bytes_come_in_pieces(feed_stdin: FeedStdin) -> None:
    pcm = make_pcm(1.0)
    feed_stdin(pcm.tobytes(), 333)
    assert np.array_equal(heard(STDIN, raw=True), pcm)


def test_a_container_is_read_from_standard_input_and_from_a_file(
    tmp_path: Path, feed_stdin: FeedStdin
) -> None:
    pcm = make_pcm(1.0)
    file = write_wav(tmp_path / "a.wav", pcm)
    assert np.array_equal(heard(str(file)), pcm)
    feed_stdin(file.read_bytes(), 1000)
    assert np.array_equal(heard(STDIN), pcm)


@pytest.mark.parametrize("raw", [False, True])
def test_other_rates_are_resampled_to_the_last_sample(tmp_path: Path, raw: bool) -> None:
    own, asked = (RATE, 48_000) if raw else (48_000, RATE)
    tone = (8000 * np.sin(2 * np.pi * 440 * np.arange(own) / own)).astype(np.int16)
    path = tmp_path / "tone"
    if raw:
        path.write_bytes(tone.tobytes())
    else:
        write_wav(path, tone, own)
    got = heard(str(path), asked, raw=raw)
    assert len(got) == pytest.approx(asked, abs=2)
    expected = 8000 * np.sin(2 * np.pi * 440 * np.arange(len(got)) / asked)
    assert np.abs(got - expected)[100:-100].max() < 200


def test_what_is_no_audio_is_told(tmp_path: Path, feed_stdin: FeedStdin) -> None:
    (tmp_path / "text").write_text("no audio at all")
    with pytest.raises(InvalidAudioError, match="text cannot be read as audio"):
        heard(str(tmp_path / "text"))
    feed_stdin(make_pcm(0.1).tobytes(), 100)
    with pytest.raises(InvalidAudioError, match="say --raw"):
        heard(STDIN)
    with pytest.raises(InvalidAudioError, match="nowhere"):
        heard(str(tmp_path / "nowhere"))


def test_a_microphone_is_heard_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a module that behaves like sounddevice, since no machine of the tests has a microphone."""
    stop = threading.Event()
    n_read = []

    class Stream:
        def __init__(self, *, samplerate: int, channels: int, dtype: str) -> None:
            assert (samplerate, channels, dtype) == (24_000, 1, "int16")

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None:
            n_read.append("closed")

        def read(self, frames: int) -> tuple[bytes, bool]:
            n_read.append("read")
            if len(n_read) == 3:
                stop.set()
            return np.full(frames, len(n_read), np.int16).tobytes(), False

    module: Any = types.ModuleType("sounddevice")
    module.__spec__ = ModuleSpec("sounddevice", None)
    module.RawInputStream, module.PortAudioError = Stream, RuntimeError
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    blocks = list(open_sound(None, 24_000, stop))
    assert [(len(block), int(block[0])) for block in blocks] == [(2400, 1), (2400, 2), (2400, 3)]
    assert n_read[-1] == "closed"
