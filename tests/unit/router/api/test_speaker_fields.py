"""The fields that ask for speakers, and what does not go with them."""

from __future__ import annotations

import base64

import pytest

from router.api.forms import parse_translation
from router.api.params import SpeakerOptions
from router.api.request_fields import MAX_REFERENCE_BYTES
from tests.support.forms import LANGUAGES, Field, parse, refusal

DIARIZED: Field = ("response_format", "diarized_json")
DIARIZE: Field = ("diarize", "true")
CHANNELS: Field = ("channels", "separate")
WAV = "data:audio/wav;base64,UklGRg=="


def known(*names: str, reference: str = WAV) -> list[Field]:
    return [
        *(("known_speaker_names[]", name) for name in names),
        *(("known_speaker_references[]", reference) for _ in names),
    ]


def test_nobody_is_told_apart_unless_asked() -> None:
    for fields in ([], [("diarize", "false")], [("channels", "mix")]):
        assert parse(*fields).speakers == SpeakerOptions()
    assert not parse().aligns


@pytest.mark.parametrize("asked", [DIARIZED, DIARIZE])
def test_speakers_by_voice_need_to_know_when_words_are_said(asked: Field) -> None:
    params = parse(asked, ("min_speakers", "2"), ("max_speakers", "4"))
    assert params.speakers == SpeakerOptions("voice", None, 2, 4)
    assert params.aligns
    assert not params.words
    assert parse(asked, ("num_speakers", "2")).speakers.num_speakers == 2


def test_a_translations_segments_have_speakers() -> None:
    pairs = [("model", "whisper-1"), DIARIZED]
    params = parse_translation(pairs, LANGUAGES)
    assert params.speakers.by == "voice"
    assert not params.aligns


def test_channels_need_no_voices() -> None:
    for fields in ([CHANNELS], [CHANNELS, DIARIZED], [CHANNELS, ("diarize", "false")]):
        assert parse(*fields).speakers == SpeakerOptions("channel")
        assert not parse(*fields).aligns
    named = parse(CHANNELS, ("channel_names[]", " Agent "), ("channel_names[]", "Caller"))
    assert named.speakers.names == ("Agent", "Caller")


def test_known_speakers_come_with_what_they_sound_like() -> None:
    speakers = parse(DIARIZED, *known("Ann", "Bob")).speakers
    assert speakers.names == ("Ann", "Bob")
    assert speakers.references == (b"RIFF", b"RIFF")
    assert "RIFF" not in repr(parse(DIARIZED, *known("Ann"))), "a log may show a request"


def test_a_reference_is_never_repeated_in_a_message() -> None:
    secret = "c2VjcmV0dm9pY2U"
    for url in (f"data:audio/wav;base64,{secret}", f"data:text/x;base64,{secret}=", secret):
        error = refusal(DIARIZED, *known("Ann", reference=url))
        assert error.param == "known_speaker_references"
        assert secret not in error.message


def test_a_reference_has_a_limit() -> None:
    longest, longer = (
        f"data:audio/wav;base64,{base64.b64encode(bytes(MAX_REFERENCE_BYTES + more)).decode()}"
        for more in (0, 3)
    )
    (content,) = parse(DIARIZED, *known("Ann", reference=longest)).speakers.references
    assert len(content) == MAX_REFERENCE_BYTES
    error = refusal(DIARIZED, *known("Ann", reference=longer))
    assert f"more than {MAX_REFERENCE_BYTES} bytes" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("num_speakers", "2")], "num_speakers"),
        ([("min_speakers", "2")], "min_speakers"),
        ([CHANNELS, ("num_speakers", "2")], "num_speakers"),
        ([CHANNELS, *known("Ann")], "known_speaker_names"),
        ([CHANNELS, DIARIZE], "diarize"),
        (known("Ann"), "known_speaker_names"),
        ([("channel_names[]", "Ann")], "channel_names"),
        ([DIARIZED, ("channel_names[]", "Ann")], "channel_names"),
        ([DIARIZE, ("num_speakers", "2"), ("max_speakers", "3")], "num_speakers"),
        ([DIARIZE, ("min_speakers", "3"), ("max_speakers", "2")], "min_speakers"),
        ([DIARIZED, ("known_speaker_names[]", "Ann")], "known_speaker_references"),
        ([DIARIZED, ("known_speaker_references[]", WAV)], "known_speaker_references"),
        ([DIARIZED, *known("Ann", "Ann")], "known_speaker_names"),
        ([DIARIZED, *known("Ann", "Bob"), ("num_speakers", "1")], "known_speaker_names"),
        ([DIARIZED, ("prompt", "p")], "prompt"),
        ([DIARIZED, ("include[]", "logprobs")], "include"),
        ([DIARIZED, ("timestamp_granularities[]", "segment")], "timestamp_granularities"),
        ([DIARIZE, ("include[]", "logprobs")], "include"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(fields: list[Field], param: str) -> None:
    error = refusal(*fields)
    assert (error.param, error.code) == (param, "incompatible_parameters")


def test_more_known_speakers_than_allowed() -> None:
    error = refusal(DIARIZED, *known(*(f"voice {i}" for i in range(17))))
    assert error.param == "known_speaker_names"
    assert error.code == "array_above_max_length"
