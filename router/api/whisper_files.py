"""A transcript as openai/whisper's command writes it: txt, vtt, srt, tsv and json.

The command line writes these into files, and `/asr` answers with them. The json has the keys text,
segments and language.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from router.api.formats import segment_bodies
from router.api.subtitles import CueOptions, srt, tsv, txt, vtt
from router.transcript import Segment, Transcript, Word

Writer = Callable[[Transcript, CueOptions], str]


def whisper_json(transcript: Transcript) -> str:
    """openai/whisper's result; segments have words only where words were asked for."""
    content = {
        "text": transcript.text,
        "segments": [_segment(segment) for segment in transcript.segments],
        "language": transcript.language,
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS: dict[str, Writer] = {
    "txt": lambda transcript, _: txt(transcript.segments),
    "vtt": lambda transcript, cues: vtt(transcript.segments, cues),
    "srt": lambda transcript, cues: srt(transcript.segments, cues),
    "tsv": lambda transcript, _: tsv(transcript.segments),
    "json": lambda transcript, _: whisper_json(transcript),
}


def _segment(segment: Segment) -> dict[str, Any]:
    (fields,) = segment_bodies([segment])
    if segment.words:
        fields["words"] = [_word(word) for word in segment.words]
    return fields


def _word(word: Word) -> dict[str, Any]:
    fields: dict[str, Any] = {"word": word.word, "start": word.start, "end": word.end}
    if not math.isnan(word.probability):  # another server's answer has none
        fields["probability"] = word.probability
    return fields
