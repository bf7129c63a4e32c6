"""Flags reach a server as fields, and its answer is written as a transcript."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.transcribe.client import read_answer, words_into_segments
from cluster.common.errors import InvalidRequestError
from router.api.formats import WRITERS, render
from router.api.params import TranscriptionParams
from router.api.subtitles import PLAIN
from router.http.models import ModelRegistry, ServedModel
from router.http.routes import create_app
from router.http.sse import EventWriter
from router.interface import Update
from router.transcript import Word
from tests.support.router_fakes import (
    LANGUAGES,
    NAMES,
    FakeTranscriber,
    make_segment,
    make_settings,
    make_transcript,
    running_server,
)
from tests.unit.cli.transcribe.conftest import CommandLine, ParseJob

FLAGS = [
    "",
    "--language German --initial_prompt Hallo --hotwords Bonn,Köln --seed 7 --temperature 0.4",
    "--beam_size 4 --patience 2 --length_penalty 0.6 --temperature_increment_on_fallback None",
    "--best_of 3 --logprob_threshold None --compression_ratio_threshold 2 --word_timestamps",
    "--decoding sequential --condition_on_previous_text False --initial_prompt Hi "
    "--carry_initial_prompt --clip_timestamps 0,1.5,3 --hallucination_silence_threshold 2",
    "--task translate --beam_size 2 --word_timestamps",
]


@pytest.fixture
def transcriber() -> FakeTranscriber:
    return FakeTranscriber()


@pytest.fixture
def url(transcriber: FakeTranscriber) -> Iterator[str]:
    registry = ModelRegistry([ServedModel(NAMES, LANGUAGES, transcriber, description="A toy.")])
    app = create_app(registry, make_settings(api_key="key"))
    with running_server(app) as base:
        yield base


@pytest.fixture
def audio(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "my.talk.wav"
    file.write_bytes(b"RIFF....WAVE")
    return file


@pytest.mark.parametrize("flags", FLAGS)
def test_a_server_understands_what_the_flags_mean(
    url: str,
    transcriber: FakeTranscriber,
    audio: Path,
    command_line: CommandLine,
    job_of: ParseJob,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
) -> None:
    out = audio.parent / "out"
    result = command_line(audio, *flags.split(), "--server", url, "--api_key", "key", "-o", out)
    assert result.exit_code == 0, result.output
    here = job_of(str(audio), *flags.split()).params
    assert replace(transcriber.params[0], model=here.model, stream=False) == here
    assert transcriber.params[0].stream
    assert transcriber.params[0].model == "whisper-1"
    assert transcriber.uploads == [audio.read_bytes()]


@pytest.mark.parametrize("flags", ["", "--word_timestamps"])
def test_a_servers_answer_is_written_as_its_transcript(
    url: str, audio: Path, command_line: CommandLine, flags: str
) -> None:
    out = audio.parent / "out"
    result = command_line(
        audio, *flags.split(), "--server", f"{url}/v1/", "--api_key", "key", "-o", out
    )
    assert result.exit_code == 0, result.output
    transcript = make_transcript(" Hello there.", " General.")
    segments = transcript.segments
    if not flags:
        segments = tuple(replace(segment, words=()) for segment in segments)
    expected = {
        name: write(replace(transcript, segments=segments), PLAIN)
        for name, write in WRITERS.items()
    }
    assert {name: (out / f"my.talk.{name}").read_text() for name in WRITERS} == expected
    assert "[00:00.000 --> 00:01.500]  Hello there." in result.output
    assert "splitscribe: A toy." in result.stderr


def test_without_a_name_it_is_told_of_the_model_that_answers(
    transcriber: FakeTranscriber, audio: Path, command_line: CommandLine
) -> None:
    models = [
        ServedModel(("a",), LANGUAGES, FakeTranscriber(), description="A toy."),
        ServedModel(("b",), LANGUAGES, transcriber, ("whisper-1",), description="A real one."),
    ]
    app = create_app(ModelRegistry(models), make_settings())
    with running_server(app) as url:
        result = command_line(audio, "--server", url, "-o", audio.parent)
    assert transcriber.uploads
    assert [line for line in result.stderr.splitlines() if "splitscribe:" in line] == [
        "splitscribe: A real one."
    ]


def test_a_servers_refusal_is_told_in_its_words(
    url: str, transcriber: FakeTranscriber, audio: Path, command_line: CommandLine
) -> None:
    other = audio.with_name("other.wav")
    other.write_bytes(b"")
    result = command_line(other, audio, "--server", url, "--api_key", "key", "-o", audio.parent)
    assert isinstance(result.exception, InvalidRequestError)
    assert "1 of 2 files failed" in str(result.exception)
    assert f"{other}: the uploaded file is empty" in result.output
    assert audio.with_suffix(".srt").exists()


def test_a_language_of_which_the_server_does_not_know_is_its_to_refuse(
    url: str, audio: Path, command_line: CommandLine
) -> None:
    result = command_line(audio, "--server", url, "--api_key", "key", "--language", "fr")
    assert "this model does not support the language 'fr'" in result.output


def test_a_wrong_key_and_a_dead_server_are_told_once_before_any_upload(
    url: str, transcriber: FakeTranscriber, audio: Path, command_line: CommandLine
) -> None:
    files = [audio, audio.with_name("b.wav")]
    files[1].write_bytes(b"RIFF")
    refused = command_line(*files, "--server", url, "--api_key", "other")
    assert "API key" in str(refused.exception)
    assert "other" not in str(refused.exception)
    nobody = command_line(*files, "--server", "http://127.0.0.1:9")
    assert "no server answers at http://127.0.0.1:9" in str(nobody.exception)
    assert transcriber.uploads == []


@pytest.mark.parametrize("answer", [None, [], {"text": "a"}, {"segments": [1]}])
def test_an_answer_that_is_no_transcript_is_refused(answer: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a verbose_json"):
        read_answer(answer, TranscriptionParams("demo"))


def test_a_broken_stream_is_asked_again_and_no_segment_is_told_twice(
    audio: Path, command_line: CommandLine
) -> None:
    """Another server's answer without a stream is read, too."""
    transcript = make_transcript(" Hello there.", " General.")
    asked: list[bytes] = []
    params = TranscriptionParams("whisper-1", response_format="verbose_json")
    begun = EventWriter(params, lambda _: "").delta(Update("", transcript.segments[:1]))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        is_model = scope["path"].endswith("/models/whisper-1")
        body, more = b"", not is_model
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        asked.append(body)
        streams = b'name="stream"' in body
        kind = b"text/event-stream" if streams else b"application/json"
        head = [(b"content-type", kind)]
        if streams:  # a length that is not reached: the connection breaks
            head.append((b"content-length", b"100000"))
        await send({"type": "http.response.start", "status": 200, "headers": head})
        model = b'{"id": "whisper-1", "object": "model", "created": 1, "owned_by": "splitscribe"}'
        whole = render(transcript, params)[0]
        content = model if is_model else begun if streams else whole
        await send({"type": "http.response.body", "body": content})

    with running_server(app) as url:
        result = command_line(audio, "--server", url, "-o", audio.parent)
    assert result.exit_code == 0, result.output
    assert len(asked) == 3
    assert result.output.count("Hello there.") == 1
    assert result.output.count("General.") == 1


def test_words_go_to_the_segments_of_their_times_with_the_space_that_the_api_took() -> None:
    bare = [make_segment(0, " A b."), make_segment(1, " C", start=2.0)]
    segments = [replace(segment, words=()) for segment in bare]
    starts = [segment.start for segment in segments]
    said = [(starts[0], "A"), (starts[0] + 0.5, "b."), (starts[1], "C"), (starts[1] + 0.5, "你")]
    found = words_into_segments(segments, [Word(at, at + 0.1, text, 0.5) for at, text in said])
    texts = [[word.word for word in segment.words] for segment in found]
    assert texts == [[" A", " b."], [" C", "你"]]
    assert words_into_segments([], [Word(0.0, 0.1, "A", 0.5)]) == []
