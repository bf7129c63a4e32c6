"""Make the recordings that ship with the demo checkpoint: about 5, 25 and 70 s.

They are chosen: a recording that the checkpoint does not get right, as the server transcribes it,
is made anew. Beside each .flac stand its text and, in a .json, the times of its sentences.
"""

import json
from pathlib import Path

import soundfile
from rich.console import Console

from benchmark.shared.speech import corpus
from benchmark.shared.speech.examples import Example, ExampleMaker
from benchmark.shared.speech.wav import to_pcm
from cluster.common.messages import SAMPLE_RATE
from cluster.demo.recipe.evaluate import errors_of, hear_served

SAMPLES = Path(__file__).parents[1] / "samples"
RECORDINGS = (("short", 5.0, "slt"), ("medium", 25.0, "en-us+f2"), ("long", 70.0, "rms"))
PAUSES_S = (0.4, 1.2)
MAX_ROUNDS = 40


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


def write(recording: Example, voice: str, base: Path) -> None:
    pcm = to_pcm(recording.audio)
    soundfile.write(base.with_suffix(".flac"), pcm, SAMPLE_RATE, subtype="PCM_16")
    base.with_suffix(".txt").write_text(recording.text + "\n")
    sentences = [
        {"text": text, "start": round(start, 2), "end": round(end, 2)}
        for start, end, text in recording.segments
    ]
    meta = {"duration": round(len(pcm) / SAMPLE_RATE, 2), "voice": voice, "sentences": sentences}
    base.with_suffix(".json").write_text(json.dumps(meta, indent=2) + "\n")


def make(checkpoint: Path, out: Path, console: Console) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, seconds, voice in RECORDINGS:
        maker = ExampleMaker(f"samples/1/{name}")
        recording, wrong = chosen(checkpoint, maker, seconds, voice)
        write(recording, voice, out / name)
        length_s = len(recording.audio) / SAMPLE_RATE
        console.print(f"{name}: {length_s:.1f} s, {wrong} words wrong")
