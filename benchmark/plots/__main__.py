"""The pictures of README.md and benchmark/README.md, from the JSON of the runs.

    python -m benchmark.plots                    # writes benchmark/plots/*.svg
    python -m benchmark.plots --to FOLDER

Every number in a picture is one in a file of `benchmark/results`: medians of a run's rounds, all
systems of a picture from the same run, rivals by name, ceilings as lines. A test draws them again
and compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.cpu.report import IN_FLIGHT, OURS
from benchmark.plots.chart import Chart, Row, bar_chart, dot_chart
from benchmark.plots.lines import Line, Panel, line_chart
from benchmark.shared.command import make_parser

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
BASE = "cpu-zen5-2-cores-base-2026-11-22"
SMALL = "cpu-zen5-2-cores-small-2026-11-22"
WITH_OPENAI = "cpu-zen5-2-cores-step-three-rounds-2026-11-22"
SMALL_WITH_OPENAI = "cpu-zen5-2-cores-step-small-2026-11-22"
CROSSOVER = "crossover-h200-2026-11-23"
PANELS = ("one request in flight", "eight requests in flight")
WORDS = {"transformers": "Hugging Face", "1 x 2 threads": "2 threads", "2 x 1 threads": "2 workers"}
COMMAND = "Drawn by python -m benchmark.plots from benchmark/results/"

Run = dict[str, Any]


def read(name: str) -> Run:
    run: Run = json.loads((RESULTS / f"{name}.json").read_text())
    return run


def every_set_up(run: Run) -> list[Row]:
    """One row for each system of a run of `benchmark.cpu`."""
    return [_row(_label(one["system"]), [one]) for one in run["rows"]]


def best_of_each(run: Run) -> list[Row]:
    """One row for each library and precision; each panel shows its fastest set-up."""
    kinds: dict[str, list[Run]] = {}
    for one in run["rows"]:
        kinds.setdefault(one["system"].partition(",")[0], []).append(one)
    return [
        _row(_label(name) + (f", best of {len(those)} set-ups" if len(those) > 1 else ""), those)
        for name, those in kinds.items()
    ]


def speed(name: str, rows: Sequence[Row], title: str, end: float, step: float) -> str:
    """Files/s of one run of `benchmark.cpu`, the fastest system with eight in flight first."""
    run = read(name)
    n_rounds = len(rows[0].rounds[0])
    counted = (
        f"medians of {n_rounds} rounds, which are the circles" if n_rounds > 1 else "one round"
    )
    n_tokens = run["rows"][0]["n_tokens"]
    chart = Chart(
        title=title,
        subtitle=f"Clips of 5 s, {n_tokens} tokens each, random weights; {counted}.",
        panels=PANELS,
        rows=sorted(rows, key=lambda row: -row.values[-1]),
        unit="files/s, more is better",
        end=end,
        step=step,
        bounds=[
            (value, f"{key.split()[1]}: {value:.1f}") for key, value in run["ceilings"].items()
        ],
        notes=[
            f"{_machine(run)}. splitscribe answers through HTTP, the others run without it.",
            "Dashed: the ceiling if every operation ran as fast as torch's widest encoder product.",
            f"{COMMAND}{name}.json",
        ],
    )
    return bar_chart(chart)


def ratios(names: Sequence[str]) -> str:
    """How many times each library's speed ours was, in each run that compared them."""
    rows = []
    for number, name in enumerate(names, start=1):
        times: dict[tuple[str, str], dict[int, float]] = {}
        for one in read(name)["comparisons"]:
            which = one["shape"], one["theirs"].split()[0]
            times.setdefault(which, {})[one["in_flight"]] = one["ratio"]
        rows += [
            Row(f"({number}) {shape}, {_label(library)}", [of[n] for n in IN_FLIGHT], is_ours=True)
            for (shape, library), of in times.items()
        ]
    chart = Chart(
        title="How many times as fast splitscribe was as each library's best set-up",
        subtitle="Our best precision against theirs; median over rounds of the ratio in a round.",
        panels=PANELS,
        rows=rows,
        unit="times their files/s",
        end=6,
        step=1,
        bounds=[(1.0, "equal speed")],
        notes=[
            f"{_machine(read(names[0]))}. {COMMAND}:",
            *(f"({number}) {name}.json" for number, name in enumerate(names, start=1)),
        ],
    )
    return dot_chart(chart)


def crossover() -> str:
    """Split clusters beside as many colocated workers, by GPUs, model, length and network."""
    rows = read(CROSSOVER)["rows"]
    panels = []
    for model, clip in dict.fromkeys((row["model"], row["clip"]) for row in rows):
        own = [row for row in rows if (row["model"], row["clip"]) == (model, clip)]
        lines = [
            Line(
                f"{link:g} Gbit/s",
                [(row["gpus"], row["ratio_of_ceilings"]) for row in those],
                [(row["gpus"], row["ratio"]) for row in those if "ratio" in row],
            )
            for link in dict.fromkeys(row["link_gbit_per_s"] for row in own)
            for those in [[row for row in own if row["link_gbit_per_s"] == link]]
        ]
        best = [(row["gpus"], row) for row in own if row["link_gbit_per_s"] == 10.0]
        overlapped = [
            (gpus, row["colocated_overlapped_ceiling"] / row["colocated_ceiling"])
            for gpus, row in best
        ]
        lines.append(Line("colocated, overlapped", overlapped))
        panels.append(Panel(f"{model}, audio of {clip}", lines))
    return line_chart(
        "Requests per second, split by colocated, on as many H200",
        "Above 1 splitting pays. A colocated worker takes turns; the grey one overlaps its roles.",
        panels,
        "GPUs",
        (16.0, 1.6),
        0.2,
        [
            "Predicted, not measured. Lines: what devices and links could do if nothing waited.",
            "Dots: simulated, the highest rate with a p95 below 1 s (5 s of audio) or 2 s (27 s).",
            f"{COMMAND}{CROSSOVER}.json",
        ],
    )


def pictures() -> dict[str, str]:
    """Each file's name and its content."""
    base, small = read(BASE), read(SMALL)
    title = "Files transcribed per second in whisper-{}'s shape on two CPU cores"
    return {
        "speed.svg": speed(BASE, best_of_each(base), title.format("base"), 8.5, 1),
        "base.svg": speed(
            BASE, every_set_up(base), title.format("base") + ", every set-up", 8.5, 1
        ),
        "small.svg": speed(
            SMALL, every_set_up(small), title.format("small") + ", every set-up", 2, 0.5
        ),
        "crossover.svg": crossover(),
        "ratios.svg": ratios([BASE, WITH_OPENAI, SMALL, SMALL_WITH_OPENAI]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=HERE, help="the folder they are written to")
    folder = parser.parse_args(argv).to
    for name, content in pictures().items():
        (folder / name).write_text(content)
        print(folder / name)
    return 0


def _row(label: str, set_ups: Sequence[Run]) -> Row:
    """Of several set-ups the fastest in each panel."""
    best = [max(set_ups, key=lambda one: one["files_per_s"][str(n)]) for n in IN_FLIGHT]
    panels = list(zip(map(str, IN_FLIGHT), best, strict=True))
    return Row(
        label,
        values=[one["files_per_s"][n] for n, one in panels],
        rounds=[one["rates"][n] for n, one in panels],
        is_ours=label.startswith(OURS),
    )


def _label(system: str) -> str:
    """As people call it: "faster-whisper int8, 2 x 1 threads" is two workers of one thread."""
    for written, said in WORDS.items():
        system = system.replace(written, said)
    return system


def _machine(run: Run) -> str:
    cpu = run["cpu"].replace("family 26 model 2", "Zen 5")
    return f"{cpu}, {run['cores']} cores, no GPU"


if __name__ == "__main__":
    sys.exit(main())
