"""Word error rates on minutes of speech: parallel mode beside sequential mode and openai-whisper.

New recordings by the demo model's own voices, with pauses and without any between sentences. The
ceiling is each sentence alone, cut out of its recording: what the model hears when nothing is cut
and nothing stands before it. All on the bundled weights, in float32 on the CPU.

    python -m benchmark.accuracy.long_form [--scale 1.0] [--threads 0]

Needs espeak-ng and flite. Prints the ceiling first, then the table, one JSON line last.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.word_errors import WordErrors, total
from cluster.messages import Pcm
from cluster.model.checkpoint import open_checkpoint
from router.api.params import SequentialOptions, TranscriptionParams
from router.transcriber import RequestTranscriber
from tests.support.audio.long_recordings import (
    Recording,
    errors_by_sentence,
    long_set,
    missing_voices,
)
from tests.support.references.transcribers import float32_transcriber, ours, theirs

PARALLEL = TranscriptionParams(model="demo", language="en", seed=0)
SEQUENTIAL = replace(PARALLEL, decoding="sequential")
UNCONDITIONED = SequentialOptions(condition_on_previous_text=False)
KINDS = ("paused", "glued")
ALONE_AT_ONCE = 4

Transcribe = Callable[[Pcm], Awaitable[str]]


@dataclass
class Result:
    """One way to transcribe, over all recordings of a kind."""

    way: str
    kind: str
    audio_s: float = 0.0
    wall_s: float = 0.0
    errors: WordErrors = field(default_factory=WordErrors)

    def add(self, recording: Recording, errors: WordErrors, wall_s: float) -> None:
        self.audio_s += recording.seconds
        self.wall_s += wall_s
        self.errors += errors

    def as_json(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "kind": self.kind,
            "wer": round(self.errors.wer, 2),
            "words": self.errors.words,
            "substitutions": self.errors.substitutions,
            "deletions": self.errors.deletions,
            "insertions": self.errors.insertions,
            "rtfx": round(self.audio_s / self.wall_s, 1),
        }


def make_ways(transcriber: RequestTranscriber, folder: Path) -> dict[str, Transcribe]:
    """What is compared, by name."""
    checkpoint = open_checkpoint("demo").path

    def by(params: TranscriptionParams) -> Transcribe:
        async def transcribe(pcm: Pcm) -> str:
            return (await ours(transcriber, params, pcm, folder)).transcript.text

        return transcribe

    def reference(**options: Any) -> Transcribe:
        async def transcribe(pcm: Pcm) -> str:
            return await asyncio.to_thread(theirs, checkpoint, pcm, language="en", **options)

        return transcribe

    return {
        "parallel": by(PARALLEL),
        "sequential": by(SEQUENTIAL),
        "sequential, unconditioned": by(replace(SEQUENTIAL, sequential=UNCONDITIONED)),
        "openai-whisper": reference(),
        "openai-whisper, unconditioned": reference(condition_on_previous_text=False),
    }


async def measure_alone(recording: Recording, transcribe: Transcribe, result: Result) -> None:
    """The ceiling: every sentence by itself."""
    slots = asyncio.Semaphore(ALONE_AT_ONCE)

    async def one(pcm: Pcm) -> str:
        async with slots:
            return await transcribe(pcm)

    began = time.perf_counter()
    texts = await asyncio.gather(*(one(recording.alone(s)) for s in recording.sentences))
    wall_s = time.perf_counter() - began
    for sentence, text in zip(recording.sentences, texts, strict=True):
        errors = total(errors_by_sentence(replace(recording, sentences=(sentence,)), text))
        result.errors += errors
    result.add(recording, WordErrors(), wall_s)


async def measure(recording: Recording, transcribe: Transcribe, result: Result) -> None:
    began = time.perf_counter()
    text = await transcribe(recording.pcm)
    wall_s = time.perf_counter() - began
    result.add(recording, total(errors_by_sentence(recording, text)), wall_s)


async def measure_all(recordings: list[Recording], threads: int) -> list[Result]:
    results: dict[tuple[str, str], Result] = {}
    with tempfile.TemporaryDirectory(prefix="splitscribe-long-form-") as folder:
        async with float32_transcriber(threads=threads) as transcriber:
            ways = make_ways(transcriber, Path(folder))
            for recording in recordings:
                kind = recording.name.split(",")[0]
                for way in ("each sentence alone", *ways):
                    result = results.setdefault((way, kind), Result(way, kind))
                    if way in ways:
                        await measure(recording, ways[way], result)
                    else:
                        await measure_alone(recording, ways["parallel"], result)
                print(f"measured {recording.name}", file=sys.stderr)
    return list(results.values())


def print_table(results: list[Result]) -> None:
    """The ceiling first."""
    for result in results[: len(KINDS)]:
        print(f"ceiling, {result.kind}: {result.errors.wer:.2f} % ({result.way})")
    table = Table(title="long recordings: word error rate in %, and what it is made of")
    for column in ("way", "kind", "WER", "words", "substituted", "deleted", "inserted", "RTFx"):
        table.add_column(column, no_wrap=True)
    for result in results:
        row = result.as_json()
        table.add_row(*(str(row[name]) for name in row))
    Console(width=120).print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: shorter recordings")
    parser.add_argument("--threads", type=int, default=0, help="of each role; 0 takes every core")
    args = parser.parse_args()
    if problem := missing_voices():
        sys.exit(problem)
    if args.threads:
        torch.set_num_threads(args.threads)
    recordings = long_set(args.scale)
    results = asyncio.run(measure_all(recordings, args.threads))
    ways = [result.way for result in results]
    results.sort(key=lambda result: (ways.index(result.way), KINDS.index(result.kind)))
    print_table(results)
    audio_s = round(sum(recording.seconds for recording in recordings))
    rows = [result.as_json() for result in results]
    print_result("long_form", {"audio_s": audio_s, "rows": rows})


if __name__ == "__main__":
    main()
