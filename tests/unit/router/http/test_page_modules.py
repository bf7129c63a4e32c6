"""The page's pure modules, run by Node: files equal the server's, words keep their times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.common.model.text.languages import LANGUAGES
from router.api.formats import document_of, segment_bodies
from router.api.params import TranscriptionParams
from router.api.subtitles import srt, txt, vtt
from router.speakers.attribution import SpokenText
from router.transcript import Segment, Transcript
from tests.support.browsers.node_page import told_by_node
from tests.support.programs import needs
from tests.support.router_fakes import make_segment, make_words

pytestmark = needs("node")
TEXTS = (
    " Hello there.",
    " <b>bold</b> & <script>alert(1)</script>",
    " an arrow ----> here",
    " two\nlines",
    " コンニチハ 世界",
    "",
)
SCRIPT = """
import * as text from "./text.js";
import { languages } from "./languages.js";
import { Resampler } from "./resample.js";
import { stagesOf } from "./timing.js";
const told = {};
const { segments, words } = asked.answer;
told.segments = text.wordsIntoSegments(segments, words);
for (const format of ["txt", "srt", "vtt"]) told[format] = text[format](told.segments);
const spoken = text.wordsIntoSegments(asked.spoken.segments, asked.spoken.words);
told.spoken = {};
for (const format of ["txt", "srt", "vtt"]) told.spoken[format] = text[format](spoken);
told.spoken.json = JSON.parse(text.FORMATS.json.write({ ...asked.spoken, segments: spoken }));
told.json = JSON.parse(text.FORMATS.json.write({ ...asked.answer, segments: told.segments }));
told.edits = asked.edits.map((edit) => text.withText(told.segments[0], edit));
told.unspaced = text.withText({ text: "はい。", words: [] }, "いいえ。").text;
told.languages = languages();
told.stages = stagesOf(asked.timing);
told.resampled = asked.rates.map(([from, to, hertz]) => {
  const resampler = new Resampler(from, to);
  const samples = [];
  const tone = (i) => Math.sin((2 * Math.PI * hertz * i) / from);
  for (let i = 0; i < from; i += 128) {
    samples.push(...resampler.push(Float32Array.from({ length: 128 }, (_, k) => tone(i + k))));
  }
  return samples;
});
console.log(JSON.stringify(told));
"""
RATES = [
    (48_000, 24_000, 1000),
    (44_100, 24_000, 3000),
    (48_000, 24_000, 15_000),
    (16_000, 24_000, 500),
]


def spoken_by(*said: tuple[str | None, str]) -> Transcript:
    segments = tuple(
        replace(make_segment(i, text, 2.0 * i), words=(), speaker=speaker)
        for i, (speaker, text) in enumerate(said)
    )
    text = SpokenText()
    text.add(segments)
    return Transcript("transcribe", "en", 9.0, text.whole, segments)


SPOKEN = spoken_by(("A <b> & --> C", " One."), ("A <b> & --> C", " Two."), ("Bob", " Three."))


def segments_of(texts: tuple[str, ...]) -> tuple[Segment, ...]:
    return tuple(make_segment(i, text, 3599.0 + 1.001 * i) for i, text in enumerate(texts))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    segments = segments_of(TEXTS)
    transcript = Transcript("transcribe", "en", 3610.5, "".join(TEXTS).strip(), segments)
    params = TranscriptionParams("", response_format="verbose_json", words=True)
    asked = {
        "answer": document_of(transcript, params),
        "spoken": document_of(SPOKEN, params),
        "edits": ["Hello there.", "Hello dear there.", "Bye.", "", "Hello"],
        "timing": 'upload;dur=1.5, encode;dur=20.0;desc="2 windows", total;dur=30.2',
        "rates": RATES,
    }
    found: dict[str, Any] = told_by_node(tmp_path_factory.mktemp("page"), SCRIPT, asked)
    return found


def test_files_are_byte_for_byte_those_of_the_server(told: dict[str, Any]) -> None:
    bare = [replace(segment, words=()) for segment in segments_of(TEXTS)]
    assert told["txt"] == txt(bare)
    assert told["srt"] == srt(bare)
    assert told["vtt"] == vtt(bare)


def test_files_name_the_speakers_as_the_server_does(told: dict[str, Any]) -> None:
    spoken, segments = told["spoken"], SPOKEN.segments
    assert (spoken["txt"], spoken["srt"], spoken["vtt"]) == (
        txt(segments),
        srt(segments),
        vtt(segments),
    )
    assert spoken["json"]["text"] == SPOKEN.text
    assert [one["speaker"] for one in spoken["json"]["segments"]] == [s.speaker for s in segments]


def test_words_joined_are_their_segment_and_keep_their_times(told: dict[str, Any]) -> None:
    for segment, found in zip(segments_of(TEXTS), told["segments"], strict=True):
        assert "".join(word["text"] for word in found["words"]) == segment.text
        times = [(word["start"], word["end"], word["probability"]) for word in found["words"]]
        assert times == [(word.start, word.end, word.probability) for word in segment.words]


def test_the_json_has_what_verbose_json_has_of_text_and_times(told: dict[str, Any]) -> None:
    segments = segments_of(TEXTS)
    body = told["json"]
    kept = ("id", "start", "end", "text")
    expected = [{name: one[name] for name in kept} for one in segment_bodies(segments)]
    assert body["segments"] == expected
    assert [word["word"] for word in body["words"]] == " ".join(TEXTS).split()
    assert (body["language"], body["duration"]) == ("english", 3610.5)


def test_an_edit_keeps_the_times_of_words_that_stay(told: dict[str, Any]) -> None:
    hello, there = make_words(TEXTS[0], 3599.0)
    same, between, other, nothing, first = told["edits"]
    assert [word["start"] for word in same["words"]] == [hello.start, there.start]
    starts = [word["start"] for word in between["words"]]
    assert [word["text"].strip() for word in between["words"]] == ["Hello", "dear", "there."]
    assert (starts[0], starts[2]) == (hello.start, there.start)
    assert between["words"][1]["start"] == hello.end
    assert [(w["start"], w["end"]) for w in other["words"]] == [(3599.0, 3600.5)]
    assert nothing["words"] == []
    assert [(w["start"], w["end"]) for w in first["words"]] == [(hello.start, hello.end)]


def test_an_edit_begins_with_a_space_where_the_text_did(told: dict[str, Any]) -> None:
    texts = [edit["text"] for edit in told["edits"]]
    assert texts == [" Hello there.", " Hello dear there.", " Bye.", "", " Hello"]
    assert told["unspaced"] == "いいえ。"


def test_the_languages_are_the_model_s(told: dict[str, Any]) -> None:
    assert sorted(code for code, _ in told["languages"]) == sorted(LANGUAGES)
    assert all(name != code for code, name in told["languages"])


def test_the_stages_are_read_from_the_header(told: dict[str, Any]) -> None:
    assert told["stages"] == [
        {"name": "upload", "ms": 1.5, "note": ""},
        {"name": "encode", "ms": 20, "note": "2 windows"},
        {"name": "total", "ms": 30.2, "note": ""},
    ]


@pytest.mark.parametrize(("index", "rates"), list(enumerate(RATES)))
def test_another_rate_keeps_a_tone_and_drops_what_it_cannot_hold(
    told: dict[str, Any], index: int, rates: tuple[int, int, int]
) -> None:
    _, to_rate, hertz = rates
    found = np.array(told["resampled"][index])
    assert abs(len(found) - to_rate) < 100
    inner = found[200:-200]
    if hertz > to_rate / 2:
        assert np.abs(inner).max() < 0.01
        return
    times = np.arange(len(found))[200:-200] / to_rate
    assert np.abs(inner - np.sin(2 * np.pi * hertz * times)).max() < 0.01
