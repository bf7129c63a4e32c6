"""Write segments as srt, vtt, tsv and plain text, byte for byte as openai/whisper (`utils.py`).

Three differences keep players from misreading a file: text has no line break of its own, "-->" is
removed from words too, and a segment without words keeps its text when others have words. Cues
also name their speaker, if there is one.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cluster.common.errors import InvalidRequestError
from router.transcript import Segment, Word

VTT_HEADER = "WEBVTT\n\n"
TSV_HEADER = "start\tend\ttext\n"
LONG_PAUSE_S = 3.0  # between the starts of two words, after which a cue ends if cues flow
_LINE_BREAK = re.compile(r"\s*[\r\n]\s*")


@dataclass(frozen=True, slots=True)
class CueOptions:
    """How cues are laid out from words. If both the width and the number of lines are limited, cues
    flow across segments, and `max_words_per_line` has no effect.
    """

    max_line_width: int | None = None  # characters
    max_line_count: int | None = None  # lines in a cue
    highlight_words: bool = False  # one cue per word, in which that word is underlined
    max_words_per_line: int | None = None  # words in a cue

    def __post_init__(self) -> None:
        for name in ("max_line_width", "max_line_count", "max_words_per_line"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"'{name}' must be at least 1, not {value}", param=name)

    @property
    def flows(self) -> bool:
        return self.max_line_width is not None and self.max_line_count is not None


PLAIN = CueOptions()


def txt(segments: Sequence[Segment]) -> str:
    return "".join(f"{_named(segment)}\n" for segment in segments)


def tsv(segments: Sequence[Segment]) -> str:
    rows = (
        f"{_milliseconds(segment.start)}\t{_milliseconds(segment.end)}\t"
        + _named(segment).replace("\t", " ")
        for segment in segments
    )
    return TSV_HEADER + "".join(f"{row}\n" for row in rows)


def srt(segments: Sequence[Segment], options: CueOptions = PLAIN) -> str:
    return "".join(_srt(i, cue) for i, cue in enumerate(_cues(segments, options), start=1))


def vtt(segments: Sequence[Segment], options: CueOptions = PLAIN) -> str:
    return VTT_HEADER + "".join(_vtt(cue) for cue in _cues(segments, options))


def srt_cue(number: int, segment: Segment) -> str:
    return _srt(number, _segment_cue(segment))


def vtt_cue(segment: Segment) -> str:
    return _vtt(_segment_cue(segment))


def clock(seconds: float) -> str:
    """`MM:SS.mmm`; `HH:MM:SS.mmm` from an hour on."""
    return _clock(_milliseconds(seconds), ".", False)


# ------------------------------------------------------------------------------------ cues


@dataclass(frozen=True, slots=True)
class _Cue:
    start_ms: int
    end_ms: int
    text: str
    speaker: str | None


def _srt(number: int, cue: _Cue) -> str:
    start, end = (_clock(ms, ",", True) for ms in (cue.start_ms, cue.end_ms))
    name = "" if cue.speaker is None else f"{_without_arrow(cue.speaker)}: "
    return f"{number}\n{start} --> {end}\n{name}{cue.text.lstrip() if name else cue.text}\n\n"


def _vtt(cue: _Cue) -> str:
    start, end = (_clock(ms, ".", False) for ms in (cue.start_ms, cue.end_ms))
    voice = "" if cue.speaker is None else f"<v {html.escape(cue.speaker, quote=False)}>"
    return f"{start} --> {end}\n{voice}{cue.text.lstrip() if voice else cue.text}\n\n"


def _cues(segments: Sequence[Segment], options: CueOptions) -> Iterator[_Cue]:
    if not any(segment.words for segment in segments):
        yield from map(_segment_cue, segments)
        return
    for words in _laid_out(_groups(segments, options.max_words_per_line), options):
        if options.highlight_words:
            yield from _highlighted(words)
        else:
            yield _words_cue(words)


def _segment_cue(segment: Segment) -> _Cue:
    text = _without_arrow(_one_line(segment.text))
    start_ms, end_ms = _milliseconds(segment.start), _milliseconds(segment.end)
    return _Cue(start_ms, end_ms, text, segment.speaker)


def _words_cue(words: Sequence[Word]) -> _Cue:
    text = "".join(word.word for word in words)
    start_ms, end_ms = _milliseconds(words[0].start), _milliseconds(words[-1].end)
    return _Cue(start_ms, end_ms, text, words[0].speaker)


def _highlighted(words: Sequence[Word]) -> Iterator[_Cue]:
    texts = [word.word for word in words]
    whole = "".join(texts)
    last_ms, speaker = _milliseconds(words[0].start), words[0].speaker
    for i, word in enumerate(words):
        start_ms, end_ms = _milliseconds(word.start), _milliseconds(word.end)
        if start_ms != last_ms:
            yield _Cue(last_ms, start_ms, whole, speaker)
        marked = "".join((*texts[:i], _underlined(texts[i]), *texts[i + 1 :]))
        yield _Cue(start_ms, end_ms, marked, speaker)
        last_ms = end_ms


def _underlined(word: str) -> str:
    bare = word.lstrip()
    return f"{word[: len(word) - len(bare)]}<u>{bare}</u>"


# ---------------------------------------------------------------------- words into lines


def _groups(segments: Iterable[Segment], max_words: int | None) -> Iterator[list[Word]]:
    for segment in segments:
        words = [
            replace(word, word=_without_arrow(_LINE_BREAK.sub(" ", word.word)))
            for word in segment.words
        ]
        if not words and segment.text.strip():
            text = _without_arrow(_one_line(segment.text))
            words = [Word(segment.start, segment.end, text, 0.0, segment.speaker)]
        step = max_words or max(1, len(words))
        yield from (words[first : first + step] for first in range(0, len(words), step))


def _laid_out(groups: Iterable[list[Word]], options: CueOptions) -> Iterator[list[Word]]:
    layout: _Layout | None = None
    for group in groups:
        for i, word in enumerate(group):
            if layout is None:
                layout = _Layout(options, word.start)
            if closed := layout.add(word, begins_group=i == 0):
                yield closed
    if layout is not None:
        yield layout.words


@dataclass(slots=True)
class _Layout:
    options: CueOptions
    last_s: float  # when its last word began
    words: list[Word] = field(default_factory=list)
    line_width: int = 0
    n_lines: int = 1

    def add(self, word: Word, *, begins_group: bool) -> list[Word]:
        """Append a word. Returns the words of the cue that it closed, or an empty list."""
        options = self.options
        changes = bool(self.words) and word.speaker != self.words[-1].speaker
        pauses = options.flows and (changes or word.start - self.last_s > LONG_PAUSE_S)
        begins_cue = begins_group and bool(self.words) and not options.flows
        width = self.line_width + len(word.word)
        fits = options.max_line_width is None or width <= options.max_line_width
        closed: list[Word] = []
        text = word.word
        if self.line_width > 0 and fits and not pauses and not begins_cue:
            self.line_width = width
        else:
            text = text.strip()
            is_full = self.n_lines >= (options.max_line_count or math.inf)
            begins_cue = begins_cue or (bool(self.words) and (pauses or is_full))
            if begins_cue:
                closed, self.words, self.n_lines = self.words, [], 1
            elif self.line_width > 0:
                self.n_lines += 1
            line_break = "\n" if self.line_width > 0 and not begins_cue else ""
            self.line_width = len(text)
            text = line_break + text
        self.words.append(replace(word, word=text))
        self.last_s = word.start
        return closed


# ------------------------------------------------------------------------- text and times


def _one_line(text: str) -> str:
    return _LINE_BREAK.sub(" ", text.strip())


def _named(segment: Segment) -> str:
    text = _one_line(segment.text)
    return text if segment.speaker is None else f"{segment.speaker}: {text}"


def _without_arrow(text: str) -> str:
    """Shorten "-->", which a player would read as a line of times."""
    return re.sub("-{2,}>", "->", text)


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


def _clock(total_ms: int, marker: str, hours: bool) -> str:
    minutes, ms = divmod(total_ms, 60_000)
    n_hours, minutes = divmod(minutes, 60)
    prefix = f"{n_hours:02d}:" if hours or n_hours else ""
    return f"{prefix}{minutes:02d}:{ms // 1000:02d}{marker}{ms % 1000:03d}"
