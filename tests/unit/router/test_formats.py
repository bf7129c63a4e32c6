"""A transcript in each response format."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from router.formats import render
from router.schemas import TranscriptionResponse, VerboseTranscriptionResponse
from tests.unit.router.fakes import make_segment, make_transcript


def test_json_has_text_and_usage_only() -> None:
    answer = render(make_transcript(" Hello there.", " Grüße"), "json")
    assert answer.media_type == "application/json"
    assert json.loads(answer.body) == {
        "text": "Hello there. Grüße",
        "usage": {"type": "duration", "seconds": 9},
    }
    TranscriptionResponse.model_validate_json(answer.body)


def test_text_ends_with_one_newline() -> None:
    answer = render(make_transcript(" Grüße"), "text")
    assert answer.media_type == "text/plain; charset=utf-8"
    assert answer.body == "Grüße\n".encode()


def test_verbose_json_has_every_required_field() -> None:
    transcript = make_transcript(" Hello there.", " General.")
    answer = render(transcript, "verbose_json")
    body = json.loads(answer.body)
    assert list(body) == ["task", "language", "duration", "text", "segments", "usage"]
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "english", 8.47)
    assert body["text"] == json.loads(render(transcript, "json").body)["text"]
    assert body["segments"][0] == {
        "id": 0,
        "seek": 0,
        "start": 0.0,
        "end": 1.5,
        "text": " Hello there.",
        "tokens": [50364, 2425, 456, 13, 50439],
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 0.7,
        "no_speech_prob": 0.01,
    }
    assert [segment["id"] for segment in body["segments"]] == [0, 1]
    VerboseTranscriptionResponse.model_validate_json(answer.body)


@pytest.mark.parametrize("duration_s", [8.0, 7.01])
def test_usage_rounds_seconds_up(duration_s: float) -> None:
    body = json.loads(render(make_transcript(" a", duration_s=duration_s), "json").body)
    assert body["usage"]["seconds"] == 8


def test_silence_is_empty_text() -> None:
    silence = make_transcript()
    assert json.loads(render(silence, "json").body)["text"] == ""
    assert render(silence, "text").body == b"\n"
    assert json.loads(render(silence, "verbose_json").body)["segments"] == []


def test_numbers_that_json_lacks_are_never_written() -> None:
    segment = replace(make_segment(), avg_logprob=float("nan"))
    transcript = replace(make_transcript(" a"), segments=(segment,))
    with pytest.raises(ValueError, match="JSON"):
        render(transcript, "verbose_json")
