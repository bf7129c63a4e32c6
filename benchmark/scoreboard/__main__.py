"""Measure the rows of README.md's table again, each by its program.

    python -m benchmark.scoreboard                    # about 70 minutes on two cores
    python -m benchmark.scoreboard --only mixed live  # these parts again
    python -m benchmark.scoreboard --show             # runs nothing: the table, and what is stale

A part is one benchmark. Its figures go into `results/scoreboard.json` as soon as it ends, so that
an interrupted run goes on where it stopped; `--again` repeats parts that are there. A row whose
code has changed since its commit is marked as stale. Ratios are of printed medians.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.shared.command import make_parser, print_table
from benchmark.shared.machine import cpu_info, versions
from cluster.common.model.device import resolve_dtype

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmark/results/scoreboard.json"
ENGINES = ("cluster/common", "encoder_worker", "decoder_worker")
SERVER = (*ENGINES, "router", "cluster/serve")
NATIVE = resolve_dtype("auto", "cpu")  # bfloat16 where this CPU multiplies it, else float32
SYSTEMS = (
    *("=splitscribe int8", f"=splitscribe {NATIVE}", "=splitscribe int8 trimmed"),
    *("faster-whisper int8", f"transformers {NATIVE}", "openai-whisper"),
)
KINDS_BESIDE = (
    *("clip beside files", "turn beside files"),
    *("clip beside speakers", "turn beside speakers", "clip beside archive"),
)
LIBRARIES = ("faster-whisper", "transformers", "openai-whisper")

Figures = dict[str, Any]
Line = dict[str, str]


@dataclass(frozen=True, slots=True)
class Part:
    """A change in the folders of `code` makes the part's rows stale."""

    command: tuple[str, ...]
    code: tuple[str, ...]
    lines: Callable[[Figures], Iterable[Line]]


def line(what: str, ours: str, beside: str) -> Line:
    return {"what": what, "splitscribe": ours, "beside it": beside}


def of_engines(figures: Figures) -> Iterable[Line]:
    """Yield files/s with one and with eight in flight; trimmed rows say that they compute less."""
    for in_flight in ("1", "8"):
        rates = {row["system"]: round(row["files_per_s"][in_flight], 2) for row in figures["rows"]}
        ours = {name: rate for name, rate in rates.items() if name.startswith("splitscribe")}
        best = {
            of: max((rate for name, rate in rates.items() if of in name), default=0.0)
            for of in LIBRARIES
        }
        for is_trimmed in (False, True):
            names = [name for name in ours if name.endswith("trimmed") == is_trimmed]
            if not names:
                continue
            name = max(names, key=ours.__getitem__)
            beside = [
                f"{rate:.2f} {of} (x {ours[name] / rate:.2f})" for of, rate in best.items() if rate
            ]
            if not is_trimmed:
                of, ceiling = max(figures["ceilings"].items(), key=lambda item: float(item[1]))
                beside.append(f"ceiling {ceiling:.2f} by products in {of.split()[1]}")
            shape, n_tokens = figures["rows"][0]["shape"], figures["rows"][0]["n_tokens"]
            what = f"files/s, {shape}'s shape, {n_tokens} tokens, {in_flight} in flight"
            what += ", computing only the audio" if is_trimmed else ""
            yield line(what, f"{ours[name]:.2f} ({name.split(' ', 1)[1]})", "; ".join(beside))


def of_errors(figures: Figures) -> Iterable[Line]:
    rates = [f"{row['wer']:.2f} % {row['system']}" for row in figures["rows"] if row["wer"]]
    ours = "; ".join(rate for rate in rates if "float32" not in rate)
    beside = "; ".join(rate for rate in rates if "float32" in rate)
    yield line("word error rate of the bundled model", ours, beside)


def of_mixed(figures: Figures) -> Iterable[Line]:
    (found,) = figures["commands"].values()
    p95 = {kind: f"{np.percentile(waits, 95):.2f} s" for kind, waits in found["waits_s"].items()}
    for kind in KINDS_BESIDE:
        yield line(f"{kind}, p95", p95[kind], f"{p95[f'{kind[:4]} alone']} alone")
    spans = {name: float(np.median(seconds)) for name, seconds in found["spans_s"].items()}
    hour_s, over_http = spans["an hour's file"], spans["the same over HTTP"]
    yield line("an hour's file", f"{hour_s:.1f} s", f"{3600 / hour_s:.0f} times as fast as spoken")
    yield line("an archive", f"{spans['archive alone']:.0f} s", f"{over_http:.0f} s over HTTP")


def of_live(figures: Figures) -> Iterable[Line]:
    last = figures["rows"][-1]
    word, n = last["word_p95_s"], last["sessions"]
    rate = f"{last['wer']:.2f} % wrong words beside {figures['file_wer']:.2f} % of whole files"
    yield line(f"a word of {n} live sessions of the bundled model, p95", f"{word:.2f} s", rate)


def of_transfer(figures: Figures) -> Iterable[Line]:
    largest = max(figures["rows"], key=lambda row: float(row["mb"]))
    times = dict(largest["median_ms"])
    ours = times.pop("ours")
    beside = "; ".join(f"{value:.1f} ms {name}" for name, value in times.items())
    yield line(f"hand-off of {largest['mb']:.0f} MB", f"{ours:.1f} ms", beside)


def of_rest(figures: Figures) -> Iterable[Line]:
    ours = f"{figures['pss_mb']:.0f} MB, {figures['busy_cores']:.3f} of a core"
    first = f"ready after {figures['ready_s']:.1f} s, first answer {figures['first_ms']:.0f} ms"
    yield line("at rest, the bundled model", ours, first)


def of_mlperf(figures: Figures) -> Iterable[Line]:
    for scenario, found in figures["scenarios"].items():
        rate = float(found.get("Samples per second") or found["Completed samples per second"])
        yield line(
            f"MLPerf's load by LoadGen, {scenario}, {figures['shape']}'s shape: windows/s and core",
            f"{rate / figures['cores']:.4f}",
            f"{figures['intel']:.4f} Intel's submission, with AMX",
        )


CPU = "benchmark.cpu"
CLIPS = ("--rounds", "2", "--files", "12", "--wer-utterances", "0", "--systems", *SYSTEMS)
PARTS = {
    "base": Part((CPU, "--shapes", "base", *CLIPS), ENGINES, of_engines),
    "small": Part(
        (
            *(CPU, "--shapes", "small", "--recording", "medium", "--tokens", "64"),
            *("--rounds", "1", "--files", "16", *CLIPS[4:]),  # 8 files would all be in flight
        ),
        ENGINES,
        of_engines,
    ),
    "errors": Part(
        (
            *(CPU, "--rounds", "1", "--files", "4", "--wer-utterances", "500", "--systems"),
            *dict.fromkeys(f"=splitscribe {dtype}" for dtype in ("int8", NATIVE, "float32")),
        ),
        ENGINES,
        of_errors,
    ),
    "mixed": Part(("benchmark.serving.mixed",), SERVER, of_mixed),
    "live": Part(("benchmark.serving.live", "--sessions", "4", "20"), SERVER, of_live),
    "transfer": Part(("benchmark.transfer.kv_transfer",), ("cluster/common/kv",), of_transfer),
    "rest": Part(("benchmark.serving.at_rest",), SERVER, of_rest),
    "mlperf": Part(("benchmark.serving.mlperf",), SERVER, of_mlperf),
}


def measure(name: str, part: Part) -> Figures:
    print(f"{name}: python -m {' '.join(part.command)}", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *part.command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}")
    print(f"{name}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    last_line = done.stdout.strip().splitlines()[-1]
    figures: Figures = json.loads(last_line.replace(f"{Path(sys.executable).parent}/", ""))
    return figures


def is_stale(part: Part, commit: str) -> bool:
    """Whether the part's code has changed since that commit, or the commit is unknown here."""
    asked = ["git", "diff", "--quiet", commit.removesuffix("-dirty"), "--", *part.code]
    return subprocess.run(asked, cwd=ROOT, stderr=subprocess.DEVNULL).returncode != 0


def rows_of(found: dict[str, Figures]) -> list[Line]:
    rows = []
    for name, part in PARTS.items():
        if (entry := found.get(name)) is None:
            continue
        stale = " (stale)" if is_stale(part, entry["commit"]) else ""
        told = {
            "command": f"python -m {' '.join(part.command)}",
            "run": f"{entry['date']} {entry['commit'][:8]}{stale}, {entry['cpu']}",
        }
        rows += [each | told for each in part.lines(entry["figures"])]
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=str([*PARTS]))
    add("--again", action="store_true", help="also what is there already")
    add("--show", action="store_true", help="run nothing")
    args = parser.parse_args()
    found = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    for name in [] if args.show else args.only:
        known = found.get(name)
        if known and not args.again and not is_stale(PARTS[name], known["commit"]):
            continue
        figures = measure(name, PARTS[name])
        machine = cpu_info() | versions()
        found[name] = {
            "date": date.today().isoformat(),
            "commit": machine["commit"],
            "cpu": f"{machine['cores']} cores of {machine['cpu']}",
            "figures": figures,
        }
        KEPT.write_text(json.dumps(found, indent=1) + "\n")
    print_table(rows_of(found))


if __name__ == "__main__":
    main()
