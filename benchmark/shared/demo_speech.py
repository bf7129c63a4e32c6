"""Speech to measure the demo model on, from the seed of `cluster.demo.recipe.evaluate`.

Training never used that seed. Each recording is a file in a cache folder, made when it is missing,
in order: fewer of them are the first of more. Needs espeak-ng and flite.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.shared.speech.wav import to_pcm, wav_bytes

if TYPE_CHECKING:
    from benchmark.shared.speech.examples import Example

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "splitscribe/benchmark"
FOLDERS = {
    "short": "demo-utterances",  # made sentences and words in free order by turns
    "long": "demo-long",  # 20 to 30 s with several sentences
    "unheard": "demo-unheard",  # as short, by two voices that training never had
    "free": "demo-free",  # words in free order alone
}


def demo_clip_files(name: str, n: int, cache: Path) -> list[Path]:
    """The first `n` recordings of a set of `FOLDERS`, each with its text beside it.

    Raises:
        SystemExit: they are not there yet, and the speech libraries are missing.
    """
    folder = cache / FOLDERS[name]
    files = [folder / f"{index:05}.wav" for index in range(n)]
    if not all(file.with_suffix(".txt").is_file() for file in files):
        _make(name, files)
    return files


def _make(name: str, files: list[Path]) -> None:
    from benchmark.shared.speech.synthesis import SynthesisError

    print(f"making {len(files)} demo recordings in {files[0].parent}", flush=True)
    files[0].parent.mkdir(parents=True, exist_ok=True)
    make = _maker(name)
    for index, file in enumerate(files):
        try:
            example = make(index)
        except SynthesisError as error:
            raise SystemExit(str(error)) from error
        file.write_bytes(wav_bytes(to_pcm(example.audio)))
        file.with_suffix(".txt").write_text(example.text)  # last: it says that the clip is whole


def _maker(name: str) -> Callable[[int], Example]:
    """What makes recording 0, 1, 2, ... of a set, in this order."""
    from benchmark.shared.speech import corpus
    from benchmark.shared.speech.examples import ExampleMaker
    from benchmark.shared.speech.synthesis import UNHEARD_VOICES

    if name == "long":
        several = ExampleMaker("several")
        return lambda _: several.several(corpus.sentence)
    if name == "free":
        runs = ExampleMaker("free runs")
        return lambda _: runs.alone(corpus.free_order)
    if name == "unheard":
        unheard = ExampleMaker("unheard")
        return lambda index: unheard.alone(
            (corpus.made_sentence, corpus.free_order)[index % 2],
            (UNHEARD_VOICES[index // 2 % len(UNHEARD_VOICES)],),
        )
    made, free = ExampleMaker("made"), ExampleMaker("free")
    return lambda index: (
        free.alone(corpus.free_order) if index % 2 else made.alone(corpus.made_sentence)
    )
