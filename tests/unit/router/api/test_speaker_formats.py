"""A transcript with speakers in each response format, whole and as a stream."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.audio import (
    TranscriptionDiarized,
    TranscriptionTextDoneEvent,
    TranscriptionTextSegmentEvent,
)

from router.api.formats import answer_of, whisper_json
from router.api.params import TranscriptionParams
from router.api.responses import (
    DiarizedSegment,
    DiarizedTranscriptionResponse,
    VerboseTranscriptionResponse,
)
from router.api.subtitles import CueOptions, srt, tsv, txt, vtt
from router.http.sse import EventWriter
from router.interface import TranscriptionResult, Update
from router.speakers.attribution import SpokenText
from router.transcript import Channel, Segment, Transcript
from tests.support.router_fakes import TIMINGS, make_segment

SAID = (("Ann", " Hello there."), ("Bob", " Hi."), ("Bob", " Fine?"), ("Ann", " Yes."))
CHANNELS = (Channel(1, "Ann"), Channel(2, "Bob"), Channel(3, None, 1), Channel(4))


def make_spoken(*said: tuple[str | None, str], **more: Any) -> Transcript:
    segments: list[Segment] = []
    for i, (speaker, text) in enumerate(said):
        one = make_segment(i, text, 2.0 * i)
        words = tuple(replace(word, speaker=speaker) for word in one.words)
        segments.append(replace(one, words=words, speaker=speaker))
    text = SpokenText()
    text.add(segments)
    return Transcript("transcribe", "en", 8.47, text.whole, tuple(segments), **more)


SPOKEN = make_spoken(*SAID)


def answer(transcript: Transcript, response_format: Any, **fields: Any) -> Any:
    return answer_of(transcript, TranscriptionParams("", response_format=response_format, **fields))


def test_a_text_has_a_line_for_each_turn() -> None:
    lines = "Ann: Hello there.\nBob: Hi. Fine?\nAnn: Yes."
    assert answer(SPOKEN, "text") == f"{lines}\n"
    assert answer(SPOKEN, "json")["text"] == lines
    some = make_spoken((None, " Hm."), ("Ann", " Yes."), (None, "  "), (None, " No."))
    assert some.text == "Hm.\nAnn: Yes.\nNo."


def test_diarized_json_is_openais() -> None:
    body = answer(SPOKEN, "diarized_json")
    assert list(body) == ["task", "duration", "text", "segments", "usage"]
    assert body["segments"][1] == {
        "type": "transcript.text.segment",
        "id": "seg_1",
        "start": 2.0,
        "end": 3.5,
        "text": " Hi.",
        "speaker": "Bob",
    }
    parsed = TranscriptionDiarized.model_validate(body, strict=True)
    assert [segment.speaker for segment in parsed.segments] == [name for name, _ in SAID]
    assert parsed.usage is not None
    DiarizedTranscriptionResponse.model_validate(body)
    assert (
        answer(make_spoken((None, " Hm.")), "diarized_json")["segments"][0]["speaker"] == "unknown"
    )


def test_channels_are_told_and_each_one_s_seconds_are_counted() -> None:
    transcript = replace(SPOKEN, channels=CHANNELS)
    for response_format in ("diarized_json", "verbose_json"):
        body = answer(transcript, response_format)
        assert body["channels"] == [
            {"channel": 1, "speaker": "Ann"},
            {"channel": 2, "speaker": "Bob"},
            {"channel": 3, "same_as": 1},
            {"channel": 4},
        ]
        assert body["usage"]["seconds"] == 17, "2 x 8.47 s"
        assert body["duration"] == 8.47
    assert "channels" not in answer(transcript, "json")


def test_verbose_json_has_speakers_where_they_are_known() -> None:
    body = answer(make_spoken(("Ann", " Hello there."), (None, " Hm.")), "verbose_json", words=True)
    assert [segment.get("speaker", "-") for segment in body["segments"]] == ["Ann", "-"]
    assert [word.get("speaker", "-") for word in body["words"]] == ["Ann", "Ann", "-"]
    VerboseTranscriptionResponse.model_validate(body)
    kept = json.loads(whisper_json(SPOKEN))["segments"][0]
    assert (kept["speaker"], kept["words"][0]["speaker"]) == ("Ann", "Ann")


def test_subtitles_name_who_speaks() -> None:
    assert "\n<v Ann>Hello there.\n\n" in answer(SPOKEN, "vtt")
    assert "\nBob: Hi.\n\n" in answer(SPOKEN, "srt")
    odd = make_spoken(("A <b> & --> C", " Hi."))
    assert "<v A &lt;b&gt; &amp; --&gt; C>Hi." in answer(odd, "vtt")
    assert "A <b> & -> C: Hi." in answer(odd, "srt")
    assert txt(SPOKEN.segments).splitlines()[1] == "Bob: Hi."
    assert tsv(SPOKEN.segments).splitlines()[2] == "2000\t3500\tBob: Hi."


@pytest.mark.parametrize(
    "options",
    [
        CueOptions(),
        CueOptions(max_line_width=80, max_line_count=2),
        CueOptions(max_words_per_line=1),
        CueOptions(highlight_words=True),
    ],
)
def test_no_cue_of_words_holds_two_speakers(options: CueOptions) -> None:
    cues = vtt(SPOKEN.segments, options).strip().split("\n\n")[1:]
    said = {"Ann": "Hello there. Yes.", "Bob": "Hi. Fine?"}
    for cue in cues:
        name, text = cue.partition("\n")[2].removeprefix("<v ").split(">", 1)
        assert all(
            word in said[name] for word in text.replace("<u>", "").replace("</u>", "").split()
        )
    assert srt(SPOKEN.segments, options).count("Ann: ") == sum("<v Ann>" in cue for cue in cues)


def events_of(content: bytes) -> list[dict[str, Any]]:
    lines = content.decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_a_stream_has_segments_and_no_deltas() -> None:
    params = TranscriptionParams("", response_format="diarized_json", stream=True)
    writer = EventWriter(params, lambda timings: "")
    assert writer.delta(Update("text")) is None
    segments = events_of(writer.delta(Update("", SPOKEN.segments[:2])) or b"")
    for event in segments:
        TranscriptionTextSegmentEvent.model_validate(event, strict=True)
        DiarizedSegment.model_validate(event)
    assert [(event["speaker"], event["text"]) for event in segments] == list(SAID[:2])
    (done,) = events_of(writer.done(TranscriptionResult(SPOKEN, TIMINGS)))
    assert done["text"] == "Hello there. Hi. Fine? Yes."
    TranscriptionTextDoneEvent.model_validate(done)
    assert list(done) == ["type", "text", "usage"]
