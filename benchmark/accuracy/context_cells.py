"""What was measured of short encoder contexts, cell by cell, kept so that a run can go on.

A cell is one slack over one part of a set's recordings, by one checkpoint: a first look at every
window with that slack, and a second one in full at those that are doubted. Slacks take turns within
a part, so that what else the machine does meets all of them. Knows nothing of rates and tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark.accuracy.looks import Look, Looker, Part
from cluster.common.messages import HOP_LENGTH, Pcm
from cluster.common.model.encoder_context import FULL, EncoderContext

FULL_SLACK = -1  # every position, whatever the content: the row to compare with


@dataclass(frozen=True, slots=True)
class Key:
    """Which cell: `part` counts the parts of a set, `slack` is in positions or FULL_SLACK."""

    model: str
    speech: str
    part: int
    slack: int


@dataclass(frozen=True, slots=True)
class Cell:
    """What came out of a cell.

    first, second: the text of each recording after the first look, and after the second one.
    windows, doubted: numbers of windows, and of those that were encoded twice.
    positions: summed over windows, of the first look. first_s, second_s: wall time of each look.
    """

    key: Key
    first: tuple[str, ...]
    second: tuple[str, ...]
    windows: int
    doubted: int
    positions: int
    first_s: float
    second_s: float


class Kept:
    """Cells in a file, one JSON object a line; a line that was cut off is left out.

    The first line holds the flags that every cell depends on.
    """

    def __init__(self, file: Path | None, flags: dict[str, Any]) -> None:
        """Raises SystemExit where the file was written with other flags."""
        self._file = file
        self.cells: dict[Key, Cell] = {}
        if file is None:
            return
        if not file.is_file():
            file.write_text(json.dumps(flags) + "\n")
            return
        first, *lines = file.read_text().splitlines() or [""]
        if first != json.dumps(flags):
            raise SystemExit(f"{file} was written with other flags: {first}. Take another file.")
        self.cells = {cell.key: cell for cell in _read(lines)}

    def add(self, cell: Cell) -> None:
        self.cells[cell.key] = cell
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(json.dumps(asdict(cell), ensure_ascii=False) + "\n")


def _read(lines: Iterable[str]) -> Iterator[Cell]:
    for line in lines:
        try:
            content = json.loads(line)
        except ValueError:
            continue  # the run ended while it wrote
        content["key"] = Key(**content["key"])
        content["first"], content["second"] = tuple(content["first"]), tuple(content["second"])
        yield Cell(**content)


def positions_for(slack: int, max_content_s: float, content_frames: int, n_audio_ctx: int) -> int:
    """As `EncoderContext.positions_for`, for a slack or FULL_SLACK."""
    if slack == FULL_SLACK:
        return FULL
    return EncoderContext(slack, max_content_s).positions_for(content_frames, n_audio_ctx)


def frames_begun(pcm: Pcm) -> int:
    """Mel frames that some sample is in: a context must hold them all, as the server's does."""
    return -(-pcm.shape[0] // HOP_LENGTH)


async def measure(looker: Looker, key: Key, part: Part, max_content_s: float) -> Cell:
    """Look at every window of a part, and once more in full at those that are doubted."""
    pieces = part.pieces
    contexts = [
        positions_for(key.slack, max_content_s, frames_begun(piece.audio.pcm), looker.n_audio_ctx)
        for piece in pieces
    ]
    first = await looker.look(pieces, contexts)
    again = [
        index for index, context in enumerate(contexts) if context != FULL and first.doubted[index]
    ]
    second = Look([], [], 0.0)
    if again:
        in_full = [pieces[index] for index in again]
        second = await looker.look(in_full, [FULL] * len(again))
    texts = list(first.texts)
    for index, text in zip(again, second.texts, strict=True):
        texts[index] = text
    return Cell(
        key,
        _joined(part, first.texts),
        _joined(part, texts),
        windows=len(pieces),
        doubted=len(again),
        positions=sum(context or looker.n_audio_ctx for context in contexts),
        first_s=first.wall_s,
        second_s=second.wall_s,
    )


def _joined(part: Part, texts: Sequence[str]) -> tuple[str, ...]:
    """The text of each recording, from those of its windows."""
    found: list[list[str]] = [[] for _ in range(part.n_clips)]
    for piece, text in zip(part.pieces, texts, strict=True):
        found[piece.clip].append(text)
    return tuple(" ".join(of_clip) for of_clip in found)
