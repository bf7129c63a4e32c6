"""Two bundled voices through the real server: who said what, streamed, by name and live."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from websockets.asyncio.client import connect

from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE
from tests.e2e.conftest import Server
from tests.support.audio.sounds import joined, silence, write_wav
from tests.support.audio.speech import pcm_of
from tests.support.live.realtime_door import append, until

PARTS = ("medium", 0, 10), ("long", 0, 10), ("medium", 10, 20), ("long", 10, 20)  # from, to, in s
PART_S = 10.5


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pcm = [
        joined(pcm_of(name)[first * SAMPLE_RATE : last * SAMPLE_RATE], silence(0.5))
        for name, first, last in PARTS
    ]
    return write_wav(tmp_path_factory.mktemp("talk") / "talk.wav", joined(*pcm))


def by_part(segments: list[Any]) -> list[set[str]]:
    found: list[set[str]] = [set() for _ in PARTS]
    for segment in segments:
        middle_s = (segment.start + segment.end) / 2
        found[min(len(PARTS) - 1, int(middle_s / PART_S))].add(segment.speaker)
    return found


def ask(server: Server, talk: Path, **more: Any) -> Any:
    """The recordings' sentences differ in pitch and formants by themselves: the count is told."""
    extra = {"num_speakers": 2, **more.pop("extra", {})}
    return server.client().audio.transcriptions.create(
        model="gpt-4o-transcribe-diarize",
        file=talk,
        response_format="diarized_json",
        extra_body=extra,
        **more,
    )


def test_two_voices_are_two_speakers(server: Server, talk: Path) -> None:
    assert by_part(ask(server, talk).segments) == [{"A"}, {"B"}, {"A"}, {"B"}]


def test_a_stream_has_speakers(server: Server, talk: Path) -> None:
    events = list(ask(server, talk, stream=True))
    segments = [event for event in events if event.type == "transcript.text.segment"]
    assert by_part(segments) == [{"A"}, {"B"}, {"A"}, {"B"}]
    assert events[-1].type == "transcript.text.done"


def test_a_known_voice_has_its_name(server: Server, talk: Path) -> None:
    sound = wav_bytes(pcm_of("long")[20 * SAMPLE_RATE : 28 * SAMPLE_RATE])
    reference = f"data:audio/wav;base64,{base64.b64encode(sound).decode()}"
    known = {"known_speaker_names": ["Ann"], "known_speaker_references": [reference]}
    segments = ask(server, talk, extra=known).segments
    assert by_part(segments) == [{"A"}, {"Ann"}, {"A"}, {"Ann"}]


async def test_a_live_session_has_speakers(server: Server, talk: Path) -> None:
    """A turn for each part: who was heard before has the letter again."""
    transcription = {"model": "whisper-1", "language": "en", "diarize": True}
    asked = {"transcription": transcription, "turn_detection": None}
    update = {"type": "session.update", "session": {"audio": {"input": asked}}}
    pcm, _ = soundfile.read(talk, dtype="float32")
    address = server.url.replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
    found: list[list[str | None]] = []
    async with connect(address) as socket, asyncio.timeout(240):
        await socket.send(json.dumps(update))
        for i in (0, 1, 0):
            part = pcm[round(i * PART_S * SAMPLE_RATE) :][: round(PART_S * SAMPLE_RATE)]
            sound = np.round(32767 * np.clip(soxr.resample(part, SAMPLE_RATE, 24_000), -1, 1))
            await append(socket, sound.astype("<i2").tobytes())
            await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
            events = await until(socket, ".completed", ".failed", "error")
            assert events[-1]["type"].endswith(".completed"), events[-1]
            segments = [event for event in events if event["type"].endswith(".segment")]
            found.append([segment["speaker"] for segment in segments])
    first, other, again = ({*part} - {None} for part in found)
    assert "A" in first
    assert other - first
    assert first <= again
