"""Who speaks, by the channels of a call, through OpenAI's SDK and the command line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai.types.audio import TranscriptionDiarized

from cluster.common.messages import SAMPLE_RATE, Pcm
from tests.e2e.conftest import SPLITSCRIBE, Server
from tests.support.audio.sounds import encode
from tests.support.audio.speech import sentence_pcm

pytestmark = pytest.mark.slow
NAMES = ["Agent", "Caller"]
CHANNELS: dict[str, Any] = {"channels": "separate", "channel_names": NAMES}
CODECS = {"pcm": ("pcm_s16le", SAMPLE_RATE), "mulaw": ("pcm_mulaw", 8_000)}


def call_of() -> tuple[Pcm, Pcm]:
    said = [sentence_pcm("long", i) for i in range(4)]
    starts, at = [], 0
    for pcm in said:
        starts.append(at)
        at += pcm.shape[0] - SAMPLE_RATE // 4
    both = np.zeros((2, at + SAMPLE_RATE), np.int16)
    for i, (start, pcm) in enumerate(zip(starts, said, strict=True)):
        both[i % 2, start : start + pcm.shape[0]] = pcm
    return both[0], both[1]


def write(path: Path, pcm: Any, codec: str) -> Path:
    name, rate = CODECS[codec]
    layout = "mono" if np.ndim(pcm) == 1 else "stereo"
    return encode(path, np.asarray(pcm), "wav", name, rate, layout)


def verbose(server: Server, path: Path, **fields: Any) -> dict[str, Any]:
    form = {"model": "whisper-1", "response_format": "verbose_json", **fields}
    with path.open("rb") as file:
        answer = httpx.post(
            f"{server.url}/v1/audio/transcriptions", data=form, files={"file": file}, timeout=120
        )
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("call") / "call.wav", np.stack(call_of()), "pcm")


@pytest.mark.parametrize(
    ("codec", "fields"),
    [("pcm", {}), ("mulaw", {}), ("pcm", {"decoding": "sequential", "language": "en"})],
)
def test_each_channel_reads_as_when_it_is_alone(
    server: Server, codec: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    both = call_of()
    asked = {**fields, "channels": "separate", "timestamp_granularities[]": ["segment", "word"]}
    whole = verbose(server, write(tmp_path / "call.wav", np.stack(both), codec), **asked)
    starts = [segment["start"] for segment in whole["segments"]]
    assert len(starts) >= 3
    for i, pcm in enumerate(both):
        name = f"channel {i + 1}"
        del asked["channels"]
        alone = verbose(server, write(tmp_path / f"{i}.wav", pcm, codec), **asked)
        asked["channels"] = "separate"
        own = [segment for segment in whole["segments"] if segment["speaker"] == name]
        assert own
        kept = ("start", "end", "text", "tokens", "avg_logprob")
        assert [[one[key] for key in kept] for one in own] == [
            [one[key] for key in kept] for one in alone["segments"]
        ]
        words = [word for word in whole["words"] if word["speaker"] == name]
        assert words == [{**word, "speaker": name} for word in alone["words"]]
    assert whole["usage"]["seconds"] > 1.9 * whole["duration"]


def test_the_sdk_reads_a_call(server: Server, call: Path) -> None:
    client = server.client(max_retries=0)
    asked: dict[str, Any] = {"model": "gpt-4o-transcribe-diarize", "file": call}
    answer = client.audio.transcriptions.create(
        **asked, response_format="diarized_json", extra_body=CHANNELS
    )
    assert isinstance(answer, TranscriptionDiarized)
    assert {segment.speaker for segment in answer.segments} == set(NAMES)
    assert [segment.id for segment in answer.segments] == [
        f"seg_{i}" for i in range(len(answer.segments))
    ]
    assert answer.text.startswith(f"{answer.segments[0].speaker}:{answer.segments[0].text}")
    stream = client.audio.transcriptions.create(
        **asked, response_format="diarized_json", stream=True, extra_body=CHANNELS
    )
    *told, done = list(stream)
    assert {event.type for event in told} == {"transcript.text.segment"}
    for event, segment in zip(told, answer.segments, strict=True):
        assert event.model_dump() == segment.model_dump()
    assert done.type == "transcript.text.done"
    assert done.text == "".join(segment.text for segment in answer.segments).strip()


def test_the_command_line_has_channels(server: Server, call: Path, tmp_path: Path) -> None:
    command = [SPLITSCRIBE, "transcribe", str(call), "--channels", "separate", "-o", str(tmp_path)]
    run = subprocess.run(
        [*command, "--server", server.url], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "] channel 2:" in run.stdout
    assert "\n<v channel 2>" in (tmp_path / "call.vtt").read_text()
    kept = json.loads((tmp_path / "call.json").read_text())
    assert {segment["speaker"] for segment in kept["segments"]} == {"channel 1", "channel 2"}
