"""Word error rate and files/s by the encoder's context: how much of 30 s a checkpoint needs.

Whisper computes 1500 encoder positions (20 ms each) for every window, whatever is in it. The server
can compute only those of the audio and some SLACK behind it, rounded up to one of a few lengths
(`encoder.context: trimmed`). What it costs depends on the weights:

    one look     the short context, greedy with timestamps, and its text as it comes
    two looks    as the server does it: a window whose text has a timestamp behind its audio, or
                 which the usual gates doubt, is encoded once more in full
    full         all positions: the row that every difference is taken from, recording by recording

    python -m benchmark.accuracy.context --demo 500                    the demo model, new speech
    python -m benchmark.accuracy.context --model openai/whisper-large-v3 --folder earnings/
    python -m benchmark.accuracy.context --model /tuned /untuned --demo 1000 --slacks 64 full

A folder holds audio with name.txt beside name.wav, or references.tsv (file, tab, text), or
references.jsonl; --manifest takes such a table by any name. Without any the demo model's own voices
speak (espeak-ng and flite): N short utterances, and a fifth as many of 20 to 30 s, of voices that
training never heard, and of words in free order. Texts are compared after Whisper's normaliser.

--state FILE keeps what is done after each part, and a later run with the same flags goes on there.
Slacks take turns within a part, so that a busy machine slows all alike. To use a result:
`encoder.context: trimmed` and `encoder.context_slack` in the settings, or encoder_context.json
({"slack": 64, "max_content_s": 30.0}) in the checkpoint's folder.

Both engines run in this process, without HTTP. Prints a table for each set, one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from benchmark.accuracy.context_cells import FULL_SLACK, Cell, Kept, Key, measure
from benchmark.accuracy.context_report import Row, as_json, print_table
from benchmark.accuracy.looks import Part, cut, looker
from benchmark.shared.clips import Clip, add_clip_flags, clips_of, demo_clips
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.word_errors import difference
from cluster.common.model.device import use_threads
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from router.audio.vad import SpeechDetector

SLACKS = ("0", "16", "32", "64", "128", "256", "full")
DEMO_SHARES = {"short": 1, "long": 5, "unheard": 5, "free": 5}  # one recording for so many of N
CELL_FLAGS = (
    "folder", "manifest", "hf_dataset", "hf_config", "hf_split", "demo", "limit",
    "part", "max_content_s", "language", "device", "dtype",
)  # fmt: skip
WARM_UP = 4  # windows, for every slack: kernels are compiled and pools touched by them
Speech = dict[str, list[Clip]]  # the recordings of each set


def parser() -> argparse.ArgumentParser:
    made = make_parser(__doc__)
    made.add_argument("--model", nargs="+", default=["demo"], help="folders or names on the Hub")
    add_clip_flags(made)
    made.add_argument("--sets", nargs="+", metavar="NAME", help=f"of {', '.join(DEMO_SHARES)}")
    made.add_argument("--limit", type=int, help="only the first recordings of each set")
    made.add_argument("--slacks", nargs="+", default=SLACKS, help="positions, and full")
    made.add_argument("--max-content-s", type=float, default=30.0, help="longer windows are full")
    made.add_argument("--language", default="en", help="of the speech; '' detects it")
    made.add_argument("--max-concurrency", type=int, default=8, help="windows in flight")
    made.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    made.add_argument("--dtype", default="auto", help="of both roles")
    made.add_argument("--threads", type=int, default=0, help="of torch; 0 takes every core")
    made.add_argument("--part", type=int, default=50, help="recordings in a part")
    made.add_argument("--state", type=Path, metavar="FILE", help="keep what is done, and go on")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    return made


def speech_of(args: argparse.Namespace) -> Speech:
    """The sets that the flags ask for.

    Raises:
        SystemExit: a recording has no reference, or a set is not known.
    """
    if args.folder or args.manifest or args.hf_dataset:
        source = args.folder or args.manifest or args.hf_dataset
        found = {Path(source).stem: clips_of(args, args.limit)}
    else:
        names = args.sets or list(DEMO_SHARES)
        if unknown := set(names) - set(DEMO_SHARES):
            raise SystemExit(f"--sets takes {', '.join(DEMO_SHARES)}, not {', '.join(unknown)}")
        n = args.demo or 500
        found = {
            name: demo_clips(name, max(1, n // DEMO_SHARES[name]), args.cache)[: args.limit]
            for name in names
        }
    for clips in found.values():
        missing = [clip.name for clip in clips if clip.reference is None]
        if missing:
            raise SystemExit(
                f"{len(missing)} of {len(clips)} recordings have no reference, the first is "
                f"{missing[0]}: write what is said into {Path(missing[0]).stem}.txt beside it, or "
                "list the files that have one in a table for --manifest"
            )
    return found


def slacks_of(texts: Sequence[str]) -> list[int]:
    """Numbers of positions, FULL_SLACK last: every row is compared with that.

    Raises:
        SystemExit: one is neither a number from 0 on nor "full".
    """
    found = set()
    for text in texts:
        if text != "full" and not text.isdecimal():
            raise SystemExit(f"--slacks takes positions from 0 on and full, not {text!r}")
        found.add(FULL_SLACK if text == "full" else int(text))
    return [*sorted(found - {FULL_SLACK}), FULL_SLACK]


def settings_of(model: str, args: argparse.Namespace) -> Settings:
    role = {"device": args.device, "dtype": args.dtype, "threads": args.threads}
    return load_settings(None, {"model": model, "encoder": role, "decoder": role}, environ={})


@dataclass(frozen=True, slots=True)
class Job:
    """Recordings of one part, and the cells of them that are not there yet."""

    name: str
    clips: list[Clip]
    keys: list[Key]


def jobs_of(model: str, speech: Speech, args: argparse.Namespace, kept: Kept) -> list[Job]:
    """What is missing of one checkpoint, in order."""
    found = []
    for name, clips in speech.items():
        for number, first in enumerate(range(0, len(clips), args.part)):
            keys = [Key(model, name, number, slack) for slack in slacks_of(args.slacks)]
            # Another slack begins each part, so that none is always behind the same one.
            turn = number % len(keys)
            missing = [key for key in [*keys[turn:], *keys[:turn]] if key not in kept.cells]
            if missing:
                found.append(Job(name, clips[first : first + args.part], missing))
    return found


async def run(
    model: str,
    jobs: Sequence[Job],
    args: argparse.Namespace,
    kept: Kept,
    progress: Progress,
) -> None:
    """Measure `jobs` of one checkpoint."""
    detector = SpeechDetector()
    total = sum(len(job.clips) * len(job.keys) for job in jobs)
    task = progress.add_task(Path(model).name, total=total)
    async with looker(settings_of(model, args), args.language or None, args.max_concurrency) as own:
        is_warm = False
        for job in jobs:
            progress.update(task, description=f"{Path(model).name}, {job.name}")
            part = await asyncio.to_thread(cut, job.clips, detector)
            if not is_warm:
                few = Part(part.n_clips, part.pieces[:WARM_UP])
                for slack in slacks_of(args.slacks):
                    await measure(own, Key(model, job.name, 0, slack), few, args.max_content_s)
                is_warm = True
            for key in job.keys:
                kept.add(await measure(own, key, part, args.max_content_s))
                progress.advance(task, len(job.clips))


def rows_of(
    model: str, name: str, clips: Sequence[Clip], kept: Kept, args: argparse.Namespace
) -> list[Row] | None:
    """The rows of one set, the full one last; None where parts are missing."""
    n_parts = -(-len(clips) // args.part)
    said = [clip.reference or "" for clip in clips]
    rows = []
    for slack in slacks_of(args.slacks):
        keys = [Key(model, name, part, slack) for part in range(n_parts)]
        cells: list[Cell] = [kept.cells[key] for key in keys if key in kept.cells]
        if len(cells) < n_parts:
            return None
        rows.append(Row.of(cells, said, args.language or None))
    return rows


def report(speech: Speech, kept: Kept, args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables; returns what the JSON line holds."""
    made: dict[str, Any] = {}
    is_whole = True
    first_full: dict[str, Row] = {}
    for model in args.model:
        for name, clips in speech.items():
            rows = rows_of(model, name, clips, kept, args)
            if rows is None:
                is_whole = False
                print(f"{model}, {name}: not all parts are done")
                continue
            full = rows[-1]
            figures = [as_json(row, full) for row in rows]
            words = sum(errors.words for errors in full.first)
            print_table(f"{model}, {name}: {len(clips)} recordings, {words} words", figures)
            entry: dict[str, Any] = {"clips": len(clips), "words": words, "rows": figures}
            other = first_full.setdefault(name, full)
            if other is not full:
                points = difference(full.first, other.first)
                entry["full_above_first_model"] = [round(value, 3) for value in points]
                value, low, high = points
                text = f"full is {value:+.2f} points ({low:+.2f} to {high:+.2f}) above"
                print(f"{text} that of {args.model[0]}")
            made.setdefault(Path(model).name, {})[name] = entry
    return {
        "models": made,
        "whole": is_whole,
        "device": args.device,
        "dtype": args.dtype,
        "in_flight": args.max_concurrency,
        "max_content_s": args.max_content_s,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    slacks_of(args.slacks)
    speech = speech_of(args)
    use_threads(args.threads)
    flags = {flag: getattr(args, flag) for flag in CELL_FLAGS}
    kept = Kept(args.state, {k: str(v) if isinstance(v, Path) else v for k, v in flags.items()})
    with Progress(console=Console(stderr=True)) as progress, suppress(KeyboardInterrupt):
        for model in args.model:
            if jobs := jobs_of(model, speech, args, kept):
                asyncio.run(run(model, jobs, args, kept, progress))
    made = report(speech, kept, args)
    print_result("context", made, args.json)
    return 0 if made["whole"] else 1


if __name__ == "__main__":
    sys.exit(main())
