"""Word error rate of live sessions by how long the workers take to answer.

    python -m benchmark.accuracy.late_answers
    python -m benchmark.accuracy.late_answers --talks 12 --seconds 60 --turns commit --late 0.05 6

Talks with known words are spoken in real time of a virtual clock, on which each encode is as late
as was asked for, so that the figures do not depend on this machine's speed. The words should depend
on it as little: late answers only let more be decided by the last decode of an utterance.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.talks import make_talks
from benchmark.shared.word_errors import count_all, total
from cluster.settings_sources import load_settings
from router.live.interface import LiveConfig, ServerVad
from tests.support.live.late_pools import LatePools, background_engines, hear

TURNS = {
    "vad": LiveConfig(language="en", turn_detection=ServerVad()),
    "commit": LiveConfig(language="en", turn_detection=None),
}


def measure(args: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """A row for each way to end turns and each lateness."""
    talks = make_talks(args.talks, args.seconds, args.seed)
    flags = {"model": args.model, "encoder": {"context": args.context}}
    settings = next(iter(load_settings(None, flags, environ={}).by_model().values()))
    rows: list[dict[str, float | int | str]] = []
    with background_engines(settings) as engines:
        for turns in args.turns:
            for late_s in args.late:
                heard = [
                    hear(engines, talk.pcm, TURNS[turns], LatePools(engines, lambda _: late_s))  # noqa: B023
                    for talk in talks
                ]
                errors = total(
                    count_all([talk.text for talk in talks], [one.text for one in heard], "en")
                )
                rows.append(
                    {
                        "turns": turns,
                        "late_s": late_s,
                        "wer": errors.wer,
                        "words": errors.words,
                        "updates": sum(one.updates for one in heard),
                        "overtaken": sum(one.overtaken for one in heard),
                    }
                )
    return rows


def main() -> None:
    """Command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--talks", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a talk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--late", type=float, nargs="+", default=[0.05, 1.0, 3.0, 6.0, 10.0])
    parser.add_argument("--turns", nargs="+", choices=list(TURNS), default=list(TURNS))
    parser.add_argument("--context", choices=["full", "trimmed"], default="trimmed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = measure(args)
    table = Table("turns end by", "answers late by", "word error rate", "updates", "overtaken")
    for row in rows:
        table.add_row(
            str(row["turns"]),
            f"{row['late_s']:g} s",
            f"{row['wer']:.2f} %",
            str(row["updates"]),
            str(row["overtaken"]),
        )
    Console(file=sys.stderr).print(table)
    print_result(
        "late_answers",
        {**cpu_info(), **versions("splitscribe", "torch"), "context": args.context, "rows": rows},
        args.out,
    )


if __name__ == "__main__":
    main()
