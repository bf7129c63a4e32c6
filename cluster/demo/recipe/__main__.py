"""The whole recipe of the bundled checkpoint in one command: speech, training, recordings.

    python -m cluster.demo.recipe --work DIR [--steps 7750] [--tune-steps 840] [--shards 20]

Each step takes up what an earlier run left in DIR: finished shards of speech, the state of either
training. Either keeps the checkpoint as it is by then in a folder of its own, which
`cluster.demo.recipe.evaluate` takes. With --out the last one, and recordings that suit it, are
written there instead of here. Needs espeak-ng and flite; without a change of seed it speaks the
same sentences again. --steps 0 does the last stage alone, the tuning to shorter contexts.

The recordings, of about 5, 25 and 70 s, are chosen: one that the checkpoint does not get right, as
the server transcribes it, is made anew. Beside each .flac stand its text and, in a .json, the times
of its sentences.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import soundfile
import torch
from rich.console import Console
from transformers.utils import logging

from benchmark.shared.command import make_parser
from benchmark.shared.speech import corpus
from benchmark.shared.speech.examples import Example, ExampleMaker
from benchmark.shared.speech.wav import to_pcm
from cluster.common.messages import SAMPLE_RATE
from cluster.common.model.encoder_context import FILE
from cluster.demo.recipe.evaluate import errors_of, hear_served
from cluster.demo.recipe.store import SHARD_SIZE, make_store
from cluster.demo.recipe.train import CHECKPOINT, CONTEXT, FROM_NOTHING, Trainer

SAMPLES = Path(__file__).parents[1] / "samples"
RECORDINGS = (("short", 5.0, "slt"), ("medium", 25.0, "en-us+f2"), ("long", 70.0, "rms"))
PAUSES_S = (0.4, 1.2)
MAX_ROUNDS = 40
DECLARED = {"slack": 64, "max_content_s": 30.0}  # what the last stage makes true


def chosen(
    checkpoint: Path, maker: ExampleMaker, seconds: float, voice: str
) -> tuple[Example, int]:
    """A recording of about `seconds`, and how many words of it are heard wrong: the fewest."""
    heard: list[tuple[Example, int]] = []
    while len(heard) < MAX_ROUNDS and (not heard or heard[-1][1]):
        made = maker.several(corpus.made_sentence, PAUSES_S, (seconds, 1.1 * seconds), (voice,))
        wrong = errors_of(made.text, hear_served(checkpoint, [made])[0].text).errors
        heard.append((made, wrong))
    return min(heard, key=lambda one: one[1])


def write_sample(recording: Example, voice: str, base: Path) -> None:
    pcm = to_pcm(recording.audio)
    soundfile.write(base.with_suffix(".flac"), pcm, SAMPLE_RATE, subtype="PCM_16")
    base.with_suffix(".txt").write_text(recording.text + "\n")
    sentences = [
        {"text": text, "start": round(start, 2), "end": round(end, 2)}
        for start, end, text in recording.segments
    ]
    meta = {"duration": round(len(pcm) / SAMPLE_RATE, 2), "voice": voice, "sentences": sentences}
    base.with_suffix(".json").write_text(json.dumps(meta, indent=2) + "\n")


def make_samples(checkpoint: Path, out: Path, console: Console) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, seconds, voice in RECORDINGS:
        maker = ExampleMaker(f"samples/1/{name}")
        recording, wrong = chosen(checkpoint, maker, seconds, voice)
        write_sample(recording, voice, out / name)
        length_s = len(recording.audio) / SAMPLE_RATE
        console.print(f"{name}: {length_s:.1f} s, {wrong} words wrong")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for speech and states")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--shard-size", type=int, default=SHARD_SIZE, help="utterances in each")
    parser.add_argument("--seed", type=int, default=1, help="of the speech")
    parser.add_argument("--steps", type=int, default=FROM_NOTHING.steps)
    parser.add_argument("--lr", type=float, default=FROM_NOTHING.lr)
    parser.add_argument("--tune-steps", type=int, default=CONTEXT.steps)
    parser.add_argument("--tune-lr", type=float, default=CONTEXT.lr)
    asked = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)
    quiet: Any = logging
    quiet.disable_progress_bar()  # of files that are loaded and saved
    speech = asked.work / "speech"
    make_store(speech, asked.shards, asked.seed, cores, asked.shard_size)
    start = CHECKPOINT
    if asked.steps:
        stage = replace(FROM_NOTHING, steps=asked.steps, lr=asked.lr)
        start = Trainer(asked.work / "weights", speech, stage, None).run(console)
    tuning = replace(CONTEXT, steps=asked.tune_steps, lr=asked.tune_lr)
    tuned = Trainer(asked.work / "context", speech, tuning, start).run(console)
    shutil.copytree(tuned, asked.out, dirs_exist_ok=True)
    (asked.out / FILE).write_text(json.dumps(DECLARED) + "\n")
    console.print(f"wrote {asked.out}")
    is_bundled = asked.out.resolve() == CHECKPOINT.resolve()
    make_samples(asked.out, SAMPLES if is_bundled else asked.out / "samples", console)


if __name__ == "__main__":
    main()
