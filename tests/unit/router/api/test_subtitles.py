"""Subtitles equal openai/whisper's writers, on whatever segments, and stay readable by players."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whisper.utils import get_writer

from cluster.common.errors import InvalidRequestError
from router.api import subtitles
from router.api.subtitles import CueOptions, srt, srt_cue, tsv, txt, vtt, vtt_cue
from router.transcript import Segment, Word
from tests.support import router_fakes as fakes

WRITERS = {"srt": srt, "vtt": vtt, "tsv": tsv, "txt": txt}
LETTERS = st.text("abcdeäß語 .,?!'<&-", min_size=1, max_size=12)
GAPS_S = st.sampled_from((0.0, 0.02, 0.3, 2.96, 3.0, 3.5, 40.0)) | st.floats(0, 5)
WIDTHS = st.none() | st.integers(1, 40)
COUNTS = st.none() | st.integers(1, 4)


def make_segment(index: int, text: str, start: float = 0.0) -> Segment:
    return replace(fakes.make_segment(index, text, start), words=())


@st.composite
def word_texts(draw: st.DrawFn) -> str:
    """As the tokenizer makes them: most with a space in front, none blank."""
    bare = draw(LETTERS).strip().replace("-->", "-") or "x"
    return draw(st.sampled_from((" ", " ", ""))) + bare


@st.composite
def spoken(draw: st.DrawFn, with_words: bool) -> list[Segment]:
    """Segments in time order, anywhere in a recording of a few hours."""
    now_s = draw(st.sampled_from((0.0, 58.5, 3598.0, 7200.1)))
    segments = []
    for i in range(draw(st.integers(0, 4))):
        words = []
        for text in draw(st.lists(word_texts(), min_size=1, max_size=8)):
            start_s = now_s + draw(GAPS_S)
            now_s = start_s + draw(GAPS_S)
            words.append(Word(start_s, now_s, text, 0.5))
        segment = make_segment(i, "".join(word.word for word in words))
        kept = tuple(words) if with_words else ()
        segments.append(replace(segment, start=words[0].start, end=now_s, words=kept))
    return segments


@st.composite
def cue_options(draw: st.DrawFn) -> CueOptions:
    return CueOptions(draw(WIDTHS), draw(COUNTS), draw(st.booleans()), draw(COUNTS))


def whispers(name: str, segments: Sequence[Segment], options: CueOptions | None = None) -> str:
    """What openai/whisper writes for the same segments."""
    result: dict[str, Any] = {"segments": []}
    for segment in segments:
        item: dict[str, Any] = {"start": segment.start, "end": segment.end, "text": segment.text}
        if segment.words:
            item["words"] = [
                {"word": w.word, "start": w.start, "end": w.end} for w in segment.words
            ]
        result["segments"].append(item)
    given_options = {
        key: getattr(options, key)
        for key in ("max_line_width", "max_line_count", "highlight_words", "max_words_per_line")
        if options is not None
    }
    file = io.StringIO()
    get_writer(name, ".").write_result(result, file, given_options)  # type: ignore[attr-defined]
    return file.getvalue()


@pytest.mark.parametrize("name", WRITERS)
@given(segments=spoken(with_words=False))
def test_segments_are_written_as_whisper_writes_them(name: str, segments: list[Segment]) -> None:
    assert WRITERS[name](segments) == whispers(name, segments)


@pytest.mark.parametrize("name", ["txt", "tsv"])
@given(segments=spoken(with_words=True))
def test_words_change_nothing_in_plain_formats(name: str, segments: list[Segment]) -> None:
    assert WRITERS[name](segments) == whispers(name, segments)


@given(segments=spoken(with_words=True), options=cue_options())
def test_words_become_cues_as_whisper_lays_them_out(
    segments: list[Segment], options: CueOptions
) -> None:
    assert srt(segments, options) == whispers("srt", segments, options)
    assert vtt(segments, options) == whispers("vtt", segments, options)


@given(segments=spoken(with_words=False))
def test_single_cues_joined_are_the_file(segments: list[Segment]) -> None:
    assert "".join(srt_cue(i, s) for i, s in enumerate(segments, start=1)) == srt(segments)
    assert subtitles.VTT_HEADER + "".join(map(vtt_cue, segments)) == vtt(segments)


@given(text=st.text("a\n\r\t ->", min_size=1), with_word=st.booleans())
def test_no_text_ends_its_cue_or_looks_like_times(text: str, with_word: bool) -> None:
    segment = make_segment(0, text)
    if with_word:
        segment = replace(segment, words=(Word(0.0, 1.5, text, 0.5), Word(1.5, 1.5, " b", 0.5)))
    for line in (srt([segment]), vtt([segment])):
        assert line.count("-->") == 1
        times, _, body = line.partition("-->")[2].partition("\n")
        assert times
        assert body.count("\n") == 2  # that of the text's only line, and the blank one
        assert "\r" not in body
    for row in (tsv([segment]).partition("\n")[2], txt([segment])):
        assert row.count("\n") == 1
    assert tsv([segment]).count("\t") == 4  # two in the header, two in the row


def test_a_segment_without_words_among_others_keeps_its_text() -> None:
    spoken_segment = replace(make_segment(0, " a b"), words=(Word(0.0, 1.5, " a b", 0.5),))
    bare = make_segment(1, " lost?", 2.0)
    assert srt([spoken_segment, bare]).endswith("2\n00:00:02,000 --> 00:00:03,500\nlost?\n\n")


@pytest.mark.parametrize("name", ["max_line_width", "max_line_count", "max_words_per_line"])
def test_a_limit_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        CueOptions(**{name: 0})
