"""How soon a stream with fallback has its first text, by the encoder's context.

    python -m benchmark.serving.first_text                      the bundled recordings, 5 to 70 s
    python -m benchmark.serving.first_text --folder talks/ --model ./my-whisper --rounds 3
    python -m benchmark.serving.first_text --talks 40 --seconds 70 --rounds 1

With fallback a window's text is sent when the whole window stands. With all encoder positions
windows are as full as they get (30 s); where contexts are trimmed, a stream's windows end at the
first good pause behind 6 s. Each recording is sent as a file and as a stream, with either context,
by turns, so that a busy machine slows all alike; encoders keep nothing. The floor is the row of a
trimmed file of up to 10 s: it is one window, however it is sent.

Both engines run in this process, without HTTP. Prints medians over rounds, with the word error
rates beside them and how far each is above that of a file in full contexts (95 % interval, over
recordings), and one JSON line last. Talks are new speech with pauses, by espeak-ng's voices.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmark.shared.clips import Clip, add_clip_flags, clips_of
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.talks import make_talks
from benchmark.shared.word_errors import WordErrors, count_all, difference, total
from cluster.demo.recipe.speech.wav import wav_bytes
from cluster.serve.in_process import local_transcriber
from cluster.settings import Settings
from cluster.settings_sources import load_settings
from router.api.params import TranscriptionParams
from router.interface import RequestContext, Update
from router.transcriber import RequestTranscriber

NO_DEADLINE_S = 24 * 3600.0
BASE = "full, file"  # what word error rates are compared with
SLACK = 64  # where neither the settings nor the checkpoint say


@dataclass
class Cell:
    """One way of sending. Times in s, a value for each round: sums over the recordings."""

    first_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)
    updates: int = 0
    windows: int = 0
    encodes: int = 0
    errors: list[WordErrors] = field(default_factory=list)  # of each recording


def talks(n: int, seconds: float) -> list[Clip]:
    """New speech, the same for the same arguments."""
    made = make_talks(n, seconds)
    return [Clip(f"{i}.wav", wav_bytes(talk.pcm), talk.text) for i, talk in enumerate(made)]


def settings_of(args: argparse.Namespace, context: str) -> Settings:
    encoder: dict[str, Any] = {"dtype": args.dtype, "context": context, "cache": False}
    if context == "trimmed":
        encoder |= {"context_slack": args.slack, "context_max_s": 30.0}
    flags = {"model": args.model, "encoder": encoder, "decoder": {"dtype": args.dtype}}
    return load_settings(None, flags, environ={})


async def send(
    transcriber: RequestTranscriber, files: Sequence[Path], language: str, stream: bool, cell: Cell
) -> list[str]:
    """Every recording once; adds a round to the cell, and returns the texts."""
    firsts, texts, began = [], [], time.perf_counter()
    cell.updates = cell.windows = cell.encodes = 0
    for file in files:
        context = RequestContext.unlimited("first-text", NO_DEADLINE_S)
        updates: list[float] = []

        def note(update: Update, told: list[float] = updates) -> None:
            told.append(time.perf_counter())

        context.on_update = note
        params = TranscriptionParams(model="m", language=language, stream=stream, seed=0)
        sent = time.perf_counter()
        result = await transcriber.transcribe(file, params, context)
        firsts.append((updates[0] if updates else time.perf_counter()) - sent)
        texts.append(result.transcript.text)
        cell.updates += len(updates)
        cell.windows += result.timings.windows
        cell.encodes += result.timings.attempts
    cell.first_s.append(statistics.mean(firsts))
    cell.all_s.append(time.perf_counter() - began)
    return texts


async def measure(args: argparse.Namespace, clips: Sequence[Clip], folder: Path) -> dict[str, Cell]:
    files = []
    for number, clip in enumerate(clips):
        files.append(folder / f"{number:05}{Path(clip.name).suffix}")
        files[-1].write_bytes(clip.read())
    references = [clip.reference or "" for clip in clips]
    cells: dict[str, Cell] = {}
    async with AsyncExitStack() as started:
        transcribers = {
            context: await started.enter_async_context(
                local_transcriber(settings_of(args, context))
            )
            for context in ("full", "trimmed")
        }
        for number in range(args.rounds + 1):  # the first warms up
            for context, transcriber in transcribers.items():
                for stream in (False, True):
                    name = f"{context}, {'stream' if stream else 'file'}"
                    cell = cells.setdefault(name, Cell()) if number else Cell()
                    texts = await send(transcriber, files, args.language, stream, cell)
                    if number and any(references):
                        cell.errors = count_all(references, texts, args.language)
    return cells


def print_table(cells: dict[str, Cell], n: int, console: Console) -> None:
    table = Table(title=f"{n} recordings, medians of rounds")
    columns = (
        "sent as",
        "first text, s",
        "all, s",
        "updates",
        "windows",
        "encodes",
        "WER",
        "above",
    )
    for column in columns:
        table.add_column(column, no_wrap=True)
    base = cells[BASE].errors
    for name, cell in cells.items():
        table.add_row(
            name,
            f"{statistics.median(cell.first_s):.2f}",
            f"{statistics.median(cell.all_s):.2f}",
            str(cell.updates),
            str(cell.windows),
            str(cell.encodes),
            f"{total(cell.errors).wer:.2f} %" if cell.errors else "-",
            "{:+.2f} ({:+.2f} to {:+.2f})".format(*difference(cell.errors, base)) if base else "-",
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="'demo', a folder, or a Hub id")
    add_clip_flags(parser)
    parser.add_argument("--talks", type=int, metavar="N", help="that many new talks")
    parser.add_argument("--seconds", type=float, default=70.0, help="of each talk")
    parser.add_argument("--language", default="en")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--slack", type=int, default=SLACK, help="of trimmed windows, in positions")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    clips = talks(args.talks, args.seconds) if args.talks else clips_of(args)
    with tempfile.TemporaryDirectory() as folder:
        cells = asyncio.run(measure(args, clips, Path(folder)))
    print_table(cells, len(clips), Console(width=120))
    figures = {
        name: {
            "first_s": round(statistics.median(cell.first_s), 3),
            "all_s": round(statistics.median(cell.all_s), 3),
            "updates": cell.updates,
            "windows": cell.windows,
            "encodes": cell.encodes,
            "wer": round(total(cell.errors).wer, 3) if cell.errors else None,
            "points": [round(value, 3) for value in difference(cell.errors, cells[BASE].errors)]
            if cell.errors
            else None,
        }
        for name, cell in cells.items()
    }
    print_result("first_text", {"recordings": len(clips), "rounds": args.rounds, "ways": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
