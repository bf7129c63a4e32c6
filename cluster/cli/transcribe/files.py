"""The files that `transcribe` writes: one per input and format, named after the input.

Each appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cluster.errors import InvalidRequestError
from router.api.formats import WRITERS
from router.api.subtitles import CueOptions
from router.transcript import Transcript


def output_path(folder: Path, audio: Path, name: str) -> Path:
    return folder / f"{audio.stem}.{name}"


def check_names(audio_files: Mapping[Path, str]) -> None:
    """Refuse inputs whose results would overwrite each other; each is told by its text.

    Raises:
        InvalidRequestError: names the first two.
    """
    taken: dict[str, str] = {}
    for file, shown in audio_files.items():
        if other := taken.get(file.stem):
            raise InvalidRequestError(
                f"{other} and {shown} would both be written to '{file.stem}.*': rename one, "
                "or transcribe them apart, each with its own --output-dir"
            )
        taken[file.stem] = shown


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
