"""`transcribe --live` sends what it hears, prints what is told, and ends as it should."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cluster.cli.transcribe import client, live
from cluster.cli.transcribe.job import LiveJob, Target
from cluster.common.errors import ConfigurationError, InvalidRequestError, WorkerError
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.live.interface import (
    LiveConfig,
    LiveEvent,
    SpeechStarted,
    TextDelta,
    TurnCompleted,
    TurnFailed,
)
from tests.support.audio.sounds import write_wav
from tests.support.references.hugging_face import make_pcm
from tests.unit.cli.transcribe.conftest import CommandLine, ParseJob

PCM = make_pcm(2.0)
TOLD: tuple[LiveEvent, ...] = (
    SpeechStarted(0, 100),
    TextDelta(0, " Hello"),
    TextDelta(0, " there."),
    TurnCompleted(0, "Hello there.", 1.0, "en"),
    TurnCompleted(1, "", 1.0, "en"),
    TextDelta(2, " Good"),
    TextDelta(2, " bye [red]."),
    TurnCompleted(2, "Good bye [red].", 1.0, "en"),
)


class PlayedLiveClient:
    rate = SAMPLE_RATE

    def __init__(self, told: tuple[LiveEvent, ...]) -> None:
        self._told = told
        self._ended = asyncio.Event()
        self.heard: list[Pcm] = []

    async def append(self, pcm: Pcm) -> None:
        self.heard.append(pcm)

    async def end(self) -> None:
        self._ended.set()

    async def events(self) -> AsyncIterator[LiveEvent]:
        await self._ended.wait()
        for one in self._told:
            yield one


@pytest.fixture
def job(tmp_path: Path) -> LiveJob:
    file = write_wav(tmp_path / "a.wav", PCM)
    return LiveJob(str(file), LiveConfig(model="small"), Target())


def play(
    monkeypatch: pytest.MonkeyPatch, job: LiveJob, told: tuple[LiveEvent, ...]
) -> tuple[PlayedLiveClient, str, str, Exception | None]:
    """What the client heard, what was printed, on which stream, and what was raised."""
    clients: list[PlayedLiveClient] = []

    @asynccontextmanager
    async def opened(job: LiveJob) -> AsyncIterator[PlayedLiveClient]:
        clients.append(PlayedLiveClient(told))
        yield clients[0]

    monkeypatch.setattr(client, "live_client", opened)
    monkeypatch.setattr(live, "download", lambda *_: None)
    out, err = (Console(file=io.StringIO(), soft_wrap=True, highlight=False) for _ in range(2))
    raised: Exception | None = None
    try:
        live.transcribe_live(job, out, err)
    except Exception as error:
        raised = error
    texts: list[Any] = [console.file for console in (out, err)]
    return clients[0], texts[0].getvalue(), texts[1].getvalue(), raised


def test_each_turn_is_a_line_and_all_sound_is_sent(
    monkeypatch: pytest.MonkeyPatch, job: LiveJob
) -> None:
    played, out, err, raised = play(monkeypatch, job, TOLD)
    assert raised is None
    assert out == "Hello there.\nGood bye [red].\n"
    assert err == ""
    assert np.array_equal(np.concatenate(played.heard), PCM)


def test_a_turn_that_failed_is_told_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, job: LiveJob
) -> None:
    told = (TextDelta(0, " Half a"), TurnFailed(0, WorkerError("no decoder")), *TOLD[5:])
    _, out, err, raised = play(monkeypatch, job, told)
    assert out == "Half a\nGood bye [red].\n"
    assert err == "splitscribe: no decoder\n"
    assert isinstance(raised, InvalidRequestError)
    assert "1 turn failed" in str(raised)


def test_sound_that_cannot_be_read_is_one_error(
    monkeypatch: pytest.MonkeyPatch, job: LiveJob
) -> None:
    *_, raised = play(monkeypatch, replace(job, source="/nowhere.wav"), TOLD)
    assert raised is not None
    assert "/nowhere.wav cannot be read as audio" in str(raised)


def test_what_a_microphone_needs_is_told_before_a_session_is_opened(
    monkeypatch: pytest.MonkeyPatch, job: LiveJob
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    monkeypatch.setattr(client, "live_client", pytest.fail)
    err = Console(file=io.StringIO())
    with pytest.raises(ConfigurationError, match="sounddevice"):
        live.transcribe_live(replace(job, source=None), err, err)
    assert err.file.getvalue() == ""  # type: ignore[attr-defined]


def test_flags_become_a_live_job(job_of: ParseJob) -> None:
    assert job_of("--live") == LiveJob(None, LiveConfig(model="turbo"), Target())
    asked = job_of(
        *("--live", "-", "--raw", "--language", "German", "--hotwords", "Ada, Grace ,"),
        *("--initial_prompt", "A talk.", "--server", "http://x:1", "--model", "turbo"),
    )
    config = LiveConfig("turbo", "de", prompt="A talk.", keywords=("Ada", "Grace"))
    assert asked == LiveJob("-", config, Target("http://x:1"), raw=True)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-f", "srt"), "--output-format has no effect with --live"),
        (("--beam_size", "5"), "--beam-size has no effect with --live"),
        (("--word_timestamps", "True"), "--word-timestamps has no effect with --live"),
        (("a.wav", "b.wav"), "one source, got 2 files"),
        (("--raw",), "not for the microphone"),
        (("--language", "Klingon"), "Klingon"),
    ],
)
def test_what_has_no_effect_is_refused(job_of: ParseJob, args: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        job_of("--live", *args)


def test_without_files_something_has_to_be_said(command_line: CommandLine) -> None:
    assert "name the files to transcribe" in str(command_line().exception)
