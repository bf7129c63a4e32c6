"""The files that `transcribe` writes: one per input and format, named after the input.

Each appears whole or not at all. The formats are openai/whisper's; its json has the keys text,
segments and language.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.errors import InvalidRequestError
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


def output_path(folder: Path, audio: Path, name: str) -> Path:
    return folder / f"{audio.stem}.{name}"


def check_names(audio_files: Sequence[Path]) -> None:
    """Refuse inputs whose results would overwrite each other.

    Raises:
        InvalidRequestError: names the first two.
    """
    taken: dict[str, Path] = {}
    for file in audio_files:
        other = taken.setdefault(file.stem, file)
        if other is not file:
            raise InvalidRequestError(
                f"{other} and {file} would both be written to '{file.stem}.*': rename one, "
                "or transcribe them apart, each with its own --output-dir"
            )


def write_results(
    transcript: Transcript, audio: Path, folder: Path, formats: Sequence[str], cues: CueOptions
) -> None:
    """Write every format. Raises OSError."""
    for name in formats:
        write_whole(output_path(folder, audio, name), WRITERS[name](transcript, cues))


def write_whole(target: Path, text: str) -> None:
    """Write beside the target, then rename: a reader never meets half a file. Raises OSError."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def _segment(segment: Segment) -> dict[str, Any]:
    (fields,) = segment_bodies([segment])
    if segment.words:
        fields["words"] = [_word(word) for word in segment.words]
    return fields


def _word(word: Word) -> dict[str, Any]:
    fields: dict[str, Any] = {"word": word.word, "start": word.start, "end": word.end}
    if not math.isnan(word.probability):  # a server's answer has none
        fields["probability"] = word.probability
    return fields
