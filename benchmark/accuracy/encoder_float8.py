"""What an encoder in 8 bits costs (`encoder.dtype: float8`), emulated on a CPU: errors of words.

The GPU's own layers run here by their plain twins: weights with a scale for each output, rows with
a scale each, both in float8_e4m3fn, sums in float32, and bfloat16 between products. The decoder is
in bfloat16, as beside a GPU's encoder.

    python -m benchmark.accuracy.encoder_float8 [--demo N] [--threads 0] [--save FILE]

Clips are those of `benchmark.accuracy.wer`; without a flag the recordings of the package. Prints
the table, one JSON line last; ends with status 1 where float8 is more than 0.3 points above
float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmark.accuracy.compared import COLUMNS, cells, clips_parser, compare
from benchmark.accuracy.gpu_rounding import AT_ONCE, REFERENCE, ROUNDINGS, Hearing, Rounding
from benchmark.shared.clips import clips_of
from benchmark.shared.command import print_result
from benchmark.shared.word_errors import count_all, total
from cluster.messages import WINDOW_SAMPLES
from cluster.model.checkpoint import open_checkpoint
from cluster.model.device import use_threads
from cluster.model.layers import as_it_is
from encoder_worker.gpu.encoder import GpuEncoder
from encoder_worker.model import AudioEncoder

GATE = 0.3  # points of word error rate above float32
FLOAT8 = "float8"


def make_encoder(*, float8: bool) -> GpuEncoder:
    """The bundled model's, as on a GPU: residual stream and products in bfloat16 or 8 bits."""
    as_on_gpu = patch("encoder_worker.model.packer", lambda *args, **flags: as_it_is)
    streams = patch("cluster.model.layers.stream_dtype", lambda device, dtype: dtype)
    with as_on_gpu, streams:
        encoder = AudioEncoder(open_checkpoint("demo"), torch.bfloat16)
    return GpuEncoder(encoder, float8=float8)


def hear_by(make: Callable[[], GpuEncoder]) -> Hearing:
    hearing = Hearing(Rounding())
    hearing.encoder = make()
    return hearing


def report(texts: dict[str, list[str]], said: list[str]) -> dict[str, Any]:
    errors = {name: count_all(said, heard, "en") for name, heard in texts.items()}
    rows = {}
    for name, counted in errors.items():
        rows[name] = compare(texts[name], counted, texts[REFERENCE], errors[REFERENCE])
    words = total(errors[REFERENCE]).words
    passed = rows[FLOAT8]["points"][0] <= GATE
    return {"model": "demo", "clips": len(said), "words": words, "rows": rows, "passed": passed}


def print_table(made: dict[str, Any]) -> None:
    table = Table("encoder", *COLUMNS, title="Encoders, emulated")
    for name, row in made["rows"].items():
        table.add_row(name, *cells(row, made["clips"]))
    Console(width=120).print(table)


def main() -> int:
    args = clips_parser(__doc__).parse_args()
    use_threads(args.threads)
    clips = [(clip.pcm(), clip.reference) for clip in clips_of(args) if clip.reference]
    clips = [(pcm, said) for pcm, said in clips if len(pcm) <= WINDOW_SAMPLES]
    systems: dict[str, Callable[[], Hearing]] = {
        REFERENCE: lambda: Hearing(ROUNDINGS[REFERENCE]),
        "bfloat16": partial(hear_by, partial(make_encoder, float8=False)),
        FLOAT8: partial(hear_by, partial(make_encoder, float8=True)),
    }
    texts: dict[str, list[str]] = {}
    for name, make in systems.items():
        hearing, heard = make(), list[str]()
        for begin in range(0, len(clips), AT_ONCE):
            heard += hearing.hear([pcm for pcm, _ in clips[begin : begin + AT_ONCE]])
        texts[name] = heard
        print(f"transcribed with {name}", file=sys.stderr, flush=True)
    made = report(texts, [said for _, said in clips])
    print_table(made)
    print_result("encoder_float8", made, args.save)
    return 0 if made["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
