"""A transcript in each response format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from router.api import formats
from router.api.params import ResponseFormat, TranscriptionParams
from router.api.responses import (
    TranscriptionResponse,
    TranslationResponse,
    VerboseTranscriptionResponse,
    VerboseTranslationResponse,
)
from router.api.subtitles import srt, vtt
from router.transcript import TokenLogprob, Transcript
from tests.support.router_fakes import make_segment, make_transcript


@dataclass
class Rendered:
    body: bytes
    media_type: str


def render(
    transcript: Transcript,
    response_format: ResponseFormat,
    told: Sequence[TokenLogprob] = (),
    **fields: Any,
) -> Rendered:
    params = TranscriptionParams("", response_format=response_format, **fields)
    return Rendered(*formats.render(transcript, params, told))


def test_json_has_text_and_usage_only() -> None:
    answer = render(make_transcript(" Hello there.", " Grüße"), "json")
    assert answer.media_type == "application/json"
    assert json.loads(answer.body) == {
        "text": "Hello there. Grüße",
        "usage": {"type": "duration", "seconds": 9},
    }
    TranscriptionResponse.model_validate_json(answer.body)


def test_json_tells_the_language_where_several_were_allowed() -> None:
    for text, found in ((" Hello.", [{"code": "en"}]), ("", [])):
        body = render(make_transcript(text), "json", languages=("de", "en")).body
        assert json.loads(body)["languages"] == found
        TranscriptionResponse.model_validate_json(body)
    verbose = render(make_transcript(" Hello."), "verbose_json", languages=("de", "en")).body
    assert "languages" not in json.loads(verbose), "it has `language`, as OpenAI's type does"


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


@pytest.mark.parametrize(
    ("words", "segments", "keys"),
    [(False, True, ["segments"]), (True, False, ["words"]), (True, True, ["segments", "words"])],
)
def test_verbose_json_lists_what_was_asked_for(
    words: bool, segments: bool, keys: list[str]
) -> None:
    transcript = make_transcript(" Hello there.", " General.")
    answer = render(transcript, "verbose_json", words=words, segments=segments)
    body = json.loads(answer.body)
    assert list(body) == ["task", "language", "duration", "text", *keys, "usage"]
    VerboseTranscriptionResponse.model_validate_json(answer.body)
    if words:
        assert body["words"] == [
            {"word": "Hello", "start": 0.0, "end": 0.5, "probability": 0.9},
            {"word": "there.", "start": 0.5, "end": 1.0, "probability": 0.9},
            {"word": "General.", "start": 2.0, "end": 2.5, "probability": 0.9},
        ]


def test_json_has_logprobs_where_they_were_asked_for() -> None:
    logprobs = [TokenLogprob(" Gr", -0.5, (32, 71, 114)), TokenLogprob("�", -0.1, (195,))]
    answer = render(make_transcript(" Grü"), "json", logprobs, logprobs=True)
    assert json.loads(answer.body)["logprobs"] == [
        {"token": " Gr", "logprob": -0.5, "bytes": [32, 71, 114]},
        {"token": "�", "logprob": -0.1, "bytes": [195]},
    ]
    TranscriptionResponse.model_validate_json(answer.body)
    assert json.loads(render(make_transcript(), "json", logprobs=True).body)["logprobs"] == []


def test_subtitles_are_one_cue_per_segment_with_the_types_of_their_formats() -> None:
    transcript = make_transcript(" Hello --> there.", " General.")
    bare = [replace(segment, words=()) for segment in transcript.segments]
    answer = render(transcript, "srt")
    assert (answer.body.decode(), answer.media_type) == (srt(bare), "text/plain; charset=utf-8")
    answer = render(transcript, "vtt")
    assert (answer.body.decode(), answer.media_type) == (vtt(bare), "text/vtt; charset=utf-8")


def test_a_translation_is_in_english_and_has_no_usage() -> None:
    translation = make_transcript(" Hello.", task="translate", language="de")
    plain = render(translation, "json")
    assert json.loads(plain.body) == {"text": "Hello."}
    TranslationResponse.model_validate_json(plain.body)
    verbose = render(translation, "verbose_json")
    body = json.loads(verbose.body)
    names = ["task", "language", "duration", "text", "source_language", "segments"]
    assert list(body) == names
    assert [body[name] for name in ("task", "language", "source_language")] == [
        "translate",
        "english",
        "german",
    ]
    VerboseTranslationResponse.model_validate_json(verbose.body)


def test_silence_is_empty_text() -> None:
    silence = make_transcript()
    assert json.loads(render(silence, "json").body)["text"] == ""
    assert render(silence, "text").body == b"\n"
    assert json.loads(render(silence, "verbose_json").body)["segments"] == []
    assert render(silence, "srt").body == b""
    assert render(silence, "vtt").body == b"WEBVTT\n\n"


def test_numbers_that_json_lacks_are_never_written() -> None:
    segment = replace(make_segment(), avg_logprob=float("nan"))
    transcript = replace(make_transcript(" a"), segments=(segment,))
    with pytest.raises(ValueError, match="JSON"):
        render(transcript, "verbose_json")
