"""Draw the picture of README.md from the JSON of the runs.

    python -m benchmark.plots                    # writes benchmark/plots/*.svg
    python -m benchmark.plots --to FOLDER

Every number is in a file of `benchmark/results`: medians of a run's rounds, all systems of a
picture from the same run, and the ceiling as a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmark.cpu.systems import IN_FLIGHT, OURS
from benchmark.shared.command import make_parser

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
SCOREBOARD = RESULTS / "scoreboard.json"
# Text stays text, and the same numbers give the same file.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "splitscribe", "font.size": 9}
OURS_COLOUR, THEIRS_COLOUR = "#0969da", "#8c959f"
CEILING_COLOUR = "#bc4c00"

Run = dict[str, Any]


def best_of_each(run: Run, in_flight: str) -> dict[str, float]:
    """Return the files/s of each library and precision in its fastest set-up, ascending."""
    best: dict[str, float] = {}
    for row in run["rows"]:
        name = row["system"].partition(",")[0].replace("transformers", "Hugging Face")
        best[name] = max(best.get(name, 0.0), row["files_per_s"][in_flight])
    return dict(sorted(best.items(), key=lambda item: item[1]))


def speed() -> Figure:
    run: Run = json.loads(SCOREBOARD.read_text())["base"]["figures"]
    ceiling_of, ceiling = max(run["ceilings"].items(), key=lambda item: item[1])
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    for axes, in_flight in zip(figure.subplots(1, len(IN_FLIGHT)), IN_FLIGHT, strict=True):
        best = best_of_each(run, str(in_flight))
        colours = [OURS_COLOUR if name.startswith(OURS) else THEIRS_COLOUR for name in best]
        bars = axes.barh(list(best), list(best.values()), color=colours)
        axes.bar_label(bars, fmt="%.2f", padding=3)
        label = f"ceiling of whole windows in {ceiling_of.split()[1]}"
        axes.axvline(ceiling, color=CEILING_COLOUR, linestyle="--", linewidth=1, label=label)
        axes.legend(loc="lower right", fontsize=7)
        axes.set_title(f"{in_flight} in flight")
        axes.set_xlabel("files/s, more is better")
        axes.set_xlim(0, 1.12 * max(ceiling, *best.values()))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Files transcribed per second in whisper-base's shape on two CPU cores")
    figure.supxlabel(
        f"Clips of 5 s, {run['rows'][0]['n_tokens']} tokens each, random weights; medians of "
        f"{len(run['rows'][0]['rates']['1'])} rounds; {run['cpu']}, {run['cores']} cores, commit "
        f"{run['commit'][:7]}.\nsplitscribe answers through HTTP, the others run without it. "
        f"Trimmed: only the audio is computed, not the padding to 30 s. From {SCOREBOARD.name}",
        size=7,
    )
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=HERE, help="the folder they are written to")
    folder = parser.parse_args(argv).to
    with matplotlib.rc_context(STYLE):
        file = folder / "speed.svg"
        speed().savefig(file, facecolor="white", metadata={"Date": None})
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
