"""Splitscribe on a CPU, through HTTP, beside other engines on the same weights and the same audio.

    python -m benchmark.cpu                          # base: about 40 minutes on two cores
    python -m benchmark.cpu --shapes tiny base small --wer-utterances 500
    python -m benchmark.cpu --shapes tiny --rounds 1 --wer-utterances 0 --systems splitscribe int8

Weights are random, and all windows take the same number of tokens. Every request is a recording of
its own. In each round the systems take turns in random order, first one request at a time, then 8
in flight. Ours is `splitscribe serve`, started for each of its turns; theirs run in processes of
their own, without HTTP. "trimmed" means that the encoder computes the audio and 64 positions, and
"float8-KV" that KV has 8 bits.

Beside each speed stands the word error rate of the bundled weights in that dtype. Prints ceilings
first, then the tables, and one JSON line last.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmark.cpu.systems import (
    IN_FLIGHT,
    KV_FLOAT8,
    OURS,
    TRIMMED,
    UNDOUBTED,
    Row,
    Splitscribe,
    System,
    by_dtype,
    our_server,
    row_json,
)
from benchmark.rivals.engines import Heard, RivalProcess, RivalSpec, rival_specs
from benchmark.shared import command
from benchmark.shared.clips import CACHE, UniqueFiles, demo_clips
from benchmark.shared.flops import SHAPES, window_flops
from benchmark.shared.forced_length import forced_checkpoint
from benchmark.shared.machine import cpu_info, product_flops, versions
from benchmark.shared.word_errors import WordErrors, count_all, total
from cluster.common.cores import usable_cores

KINDS = (
    "float32",
    "bfloat16",
    f"bfloat16 {KV_FLOAT8}",
    "int8",
    f"float32 {TRIMMED}",
    f"bfloat16 {TRIMMED}",
    f"bfloat16 {KV_FLOAT8} {TRIMMED}",
    f"int8 {TRIMMED}",
)
SLOW = ("transformers", "openai-whisper")  # take a third of the files
DEMO = Path(__file__).parents[2] / "cluster/demo/checkpoint"
SETTLE_S = 0.5  # other engines' threads spin for a while after their work


def word_errors(
    kinds: Sequence[str], rivals: Sequence[RivalSpec], n: int
) -> dict[str, list[WordErrors]]:
    """Measure every system on the bundled weights, by its name; empty if `n` is 0."""
    if not n:
        return {}
    clips = demo_clips(n)
    files = [clip.audio for clip in clips if isinstance(clip.audio, Path)]
    said = [clip.reference or "" for clip in clips]
    demo = CACHE / "demo-checkpoint"  # its conversions stand beside it
    if not demo.is_dir():
        shutil.copytree(DEMO, demo)
    found: dict[str, list[WordErrors]] = {}

    def measure(system: System) -> None:
        heard = system.run(files, 8)
        found[system.name] = count_all(said, [one.text for one in heard], "en")
        summed = total(found[system.name])
        print(f"word error rate {summed.wer:.2f} %: {system.name}", flush=True)

    if kinds:
        with our_server(by_dtype("demo", demo, kinds)) as systems:
            for ours in systems:
                measure(ours)
    for spec in rivals:
        rival = RivalProcess(spec, demo)
        measure(rival)
        rival.close()
    return found


def compare(
    shape: str,
    kinds: Sequence[str],
    specs: Sequence[RivalSpec],
    audio: UniqueFiles,
    args: argparse.Namespace,
) -> list[Row]:
    weights = CACHE / f"{shape}-{args.tokens}-tokens"
    checkpoint = forced_checkpoint(weights, SHAPES[shape], args.tokens)
    warm_up = audio.take(max(IN_FLIGHT))
    with ExitStack() as stack:
        rivals = [RivalProcess(spec, checkpoint) for spec in specs]
        rows = {rival.name: Row(rival.name) for rival in rivals}
        for rival in rivals:
            stack.callback(rival.close)
            rows[rival.name].n_tokens = _warm_up(rival, warm_up)[0].n_tokens
        loaded_already: Any = nullcontext
        turns: list[tuple[str, Callable[[], AbstractContextManager[System]]]]
        turns = [(rival.name, partial(loaded_already, rival)) for rival in rivals]
        for kind in kinds:
            row = Row(f"{OURS} {kind}")
            rows[row.system] = row
            turns.append((row.system, partial(_served, shape, checkpoint, kind, warm_up, row)))
        for number in range(args.rounds):
            random.Random(number).shuffle(turns)
            files = {in_flight: audio.take(args.files) for in_flight in IN_FLIGHT}
            for name, loaded in turns:
                with loaded() as system:
                    for in_flight in IN_FLIGHT:
                        _measure(system, rows[name], files[in_flight], in_flight)
            print(f"{shape}: round {number + 1} of {args.rounds} is done", flush=True)
    return list(rows.values())


@contextmanager
def _served(
    shape: str, checkpoint: Path, kind: str, warm_up: Sequence[Path], row: Row
) -> Iterator[Splitscribe]:
    with our_server(by_dtype(shape, checkpoint, (kind,)), UNDOUBTED) as (ours,):
        _warm_up(ours, warm_up)
        row.n_tokens = row.n_tokens or ours.n_tokens(warm_up[0])
        yield ours


def _warm_up(system: System, files: Sequence[Path]) -> list[Heard]:
    heard = system.run(files, max(IN_FLIGHT))
    system.run(files[:1], 1)
    return heard


def _measure(system: System, row: Row, files: Sequence[Path], in_flight: int) -> None:
    """Measure one turn. One at a time it takes a quarter of the files, slow engines a third."""
    n = len(files) if in_flight > 1 else max(2, len(files) // 4)
    if system.name.startswith(SLOW):
        n = max(in_flight, n // 3)
    time.sleep(SETTLE_S)
    began = time.perf_counter()
    system.run(files[:n], in_flight)
    row.rate.setdefault(in_flight, []).append(n / (time.perf_counter() - began))


def print_ceilings(shapes: Sequence[str], n_tokens: int, console: Console) -> dict[str, Any]:
    """Print windows/s if all operations ran as fast as the encoder's widest product in torch."""
    ceilings: dict[str, Any] = {}
    for shape in shapes:
        flops = window_flops(SHAPES[shape], n_tokens)
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            speed = product_flops(dtype, SHAPES[shape])
            ceilings[f"{shape} {name}"] = round(speed / flops, 2)
            console.print(
                f"ceiling of {shape} in {name}: {flops / 1e9:.0f} GFLOP a window, products run at "
                f"{speed / 1e9:.0f} GFLOP/s: {speed / flops:.1f} windows/s"
            )
    return ceilings


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["base"], choices=list(SHAPES))
    parser.add_argument(
        "--systems",
        nargs="+",
        help="only those with one of these in their name; '=NAME': only the one",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=24, help="in a round, 8 in flight")
    parser.add_argument("--tokens", type=int, default=18, help="of each window")
    parser.add_argument(
        "--recording", default="short", choices=["short", "medium"], help="5 s or 25 s"
    )
    parser.add_argument("--wer-utterances", type=int, default=100, help="0: no word error rates")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # every engine is told its threads
        os.environ.pop(name, None)
    torch.set_num_threads(usable_cores())
    console = Console(width=170)

    def wanted(name: str) -> bool:
        parts = args.systems or [name]
        return any(part == f"={name}" or part in name for part in parts)

    kinds = [kind for kind in KINDS if wanted(f"{OURS} {kind}")]
    rivals = [spec for spec in rival_specs(usable_cores()) if wanted(spec.name)]
    CACHE.mkdir(parents=True, exist_ok=True)
    machine = {**cpu_info(), **versions("torch", "faster-whisper", "ctranslate2", "transformers")}
    console.print(f"{machine['cpu']}, {machine['cores']} cores, {' '.join(machine['flags'])}")
    ceilings = print_ceilings(args.shapes, args.tokens, console)
    errors = word_errors(kinds, rivals, args.wer_utterances)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        audio = UniqueFiles(Path(folder), args.recording)
        for shape in args.shapes:
            measured = compare(shape, kinds, rivals, audio, args)
            found = [row_json(shape, row, errors) for row in measured]
            command.print_table(({**row, "rates": None} for row in found), shape)
            rows += found
    report = {
        **machine,
        "load_average": os.getloadavg(),
        "recording": args.recording,
        "ceilings": ceilings,
        "rows": rows,
    }
    command.print_result("cpu", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
