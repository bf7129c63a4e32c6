r"""Word error rate of any server with OpenAI's transcription endpoint, and a gate on it.

    splitscribe serve &
    python -m benchmark.accuracy.wer --demo 500 --save float32.json
    python -m benchmark.accuracy.wer --demo 500 --baseline float32.json --fail-above baseline+0.1
    python -m benchmark.accuracy.wer --url http://gpu:8000 --fail-above 12.77+0.1 --hf-split train \
        --hf-dataset D4nt3/esb-datasets-earnings22-validation-tiny-filtered

Recordings: `benchmark.shared.clips`. Texts are compared after Whisper's normaliser. A request that
failed has lost all of its words, and is listed. The interval is a bootstrap over recordings, at
95 %; with `--baseline` the difference is taken recording by recording. Prints a table, and one JSON
line last. The exit status is 1 if the gate fails or nothing was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmark.shared import command
from benchmark.shared.clips import Clip, add_clip_flags, clips_of
from benchmark.shared.openai_client import Client, Outcome, Upload, form_fields, send_all
from benchmark.shared.word_errors import WordErrors, count_all, difference, interval, total

SHOWN_FAILURES = 10
BASELINE = "baseline"


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, or its /v1")
    parser.add_argument("--model", default="whisper-1", help="[%(default)s]")
    parser.add_argument("--api-key")
    add_clip_flags(parser)
    parser.add_argument("--language", default="en", help="of the speech; '' lets the server detect")
    parser.add_argument("--max-concurrency", type=int, default=8, help="requests in flight")
    parser.add_argument("--save", type=Path, help="keep texts and counts, for --baseline")
    parser.add_argument("--baseline", type=Path, help="a file that --save wrote for these clips")
    parser.add_argument(
        "--fail-above", metavar="WER", help="in percent: 12.87, 12.77+0.1 or baseline+0.1"
    )
    return parser


async def transcribe(clips: Sequence[Clip], args: argparse.Namespace) -> list[Outcome]:
    async with Client(args.url, args.api_key) as client:
        fields = form_fields(args.model, args.language)
        uploads = [Upload.of(clip.read(), Path(clip.name).name, fields) for clip in clips]
        return await send_all(client, uploads, args.max_concurrency)


def limit_of(text: str, baseline: WordErrors | None) -> float:
    """Return the highest word error rate that passes, in percent."""
    limit = 0.0
    for part in text.split("+"):
        if part.strip() == BASELINE:
            if baseline is None:
                raise SystemExit("--fail-above baseline needs --baseline FILE")
            limit += baseline.wer
            continue
        try:
            limit += float(part)
        except ValueError:
            raise SystemExit(
                f"--fail-above takes 12.77+0.1 or baseline+0.1, not {text!r}"
            ) from None
    return limit


def read_baseline(file: Path, clips: Sequence[Clip]) -> list[WordErrors]:
    rows = {row["name"]: row for row in json.loads(file.read_text())["clips"]}
    missing = [clip.name for clip in clips if clip.name not in rows]
    if missing:
        raise SystemExit(f"{file} has no {missing[0]}: a baseline is of the same recordings")
    return [WordErrors(*rows[clip.name]["errors"]) for clip in clips]


def save(
    file: Path,
    report: dict[str, Any],
    clips: Sequence[Clip],
    outcomes: Sequence[Outcome],
    errors: Sequence[WordErrors],
) -> None:
    rows = [
        {
            "name": clip.name,
            "reference": clip.reference,
            "text": outcome.text,
            "failure": outcome.failure,
            "error": outcome.error,
            "errors": astuple(one),
        }
        for clip, outcome, one in zip(clips, outcomes, errors, strict=True)
    ]
    file.write_text(json.dumps({**report, "clips": rows}, ensure_ascii=False, indent=1) + "\n")


def print_report(report: dict[str, Any], failures: Sequence[tuple[str, Outcome]]) -> None:
    console = Console(width=120)
    for name, outcome in failures[:SHOWN_FAILURES]:
        console.print(f"failed: {name}: {outcome.failure} {outcome.error}", markup=False)
    if len(failures) > SHOWN_FAILURES:
        console.print(f"and {len(failures) - SHOWN_FAILURES} more failed")
    names = ("clips", "words", "substitutions", "deletions", "insertions", "wer", "interval")
    row = {name: report[name] for name in names}
    command.print_table([row], f"{report['url']}: word error rate in %, Whisper's normaliser")
    if "above_baseline" in report:
        points, low, high = report["above_baseline"]
        console.print(f"above the baseline by {points:+.2f} points ({low:+.2f} to {high:+.2f})")
    if report["limit"] is not None:
        verdict = "passes" if report["passed"] else "FAILS"
        console.print(f"gate: at most {report['limit']:.2f} %: {verdict}")


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    found = clips_of(args)
    clips = [clip for clip in found if clip.reference is not None]
    if not clips:
        raise SystemExit("no recording has a reference: nothing to compare with")
    if len(clips) < len(found):
        print(f"{len(found) - len(clips)} recordings have no reference and are left out")
    baseline = read_baseline(args.baseline, clips) if args.baseline else None
    limit = None
    if args.fail_above is not None:
        limit = limit_of(args.fail_above, total(baseline) if baseline else None)

    began = time.perf_counter()
    outcomes = asyncio.run(transcribe(clips, args))
    wall_s = time.perf_counter() - began
    said = [clip.reference or "" for clip in clips]
    errors = count_all(said, [None if o.failure else o.text for o in outcomes], args.language)
    failures = [(c.name, o) for c, o in zip(clips, outcomes, strict=True) if o.failure]
    summed = total(errors)
    report: dict[str, Any] = {
        "url": args.url,
        "clips": len(clips),
        "words": summed.words,
        "substitutions": summed.substitutions,
        "deletions": summed.deletions,
        "insertions": summed.insertions,
        "wer": round(summed.wer, 3),
        "interval": [round(bound, 3) for bound in interval(errors)],
        "failures": dict(Counter(outcome.failure for _, outcome in failures)),
        "wall_s": round(wall_s, 2),
        "limit": limit,
        "passed": len(failures) < len(clips) and (limit is None or summed.wer <= limit),
    }
    if baseline:
        points = difference(errors, baseline)
        report["above_baseline"] = [round(value, 3) for value in points]
    print_report(report, failures)
    if args.save:
        save(args.save, report, clips, outcomes, errors)
    command.print_result("wer", report)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
