"""Measure a demo checkpoint on new speech, as it is served.

    python -m cluster.demo.recipe.evaluate [--checkpoint DIR] [--scale 1.0]

The sets are from a seed that training never used: made sentences, words in free order, both by
voices that training never heard, sentences of shapes that the corpus cannot make (`shapes.txt`),
windows of 20 to 30 s with several sentences, and windows without speech. Word error rates are on
normalised text: lowercase, no punctuation. Each window goes through audio workers, encoder and
decoder, with the server's defaults. Prints a table, and one JSON line last.
"""

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.progress import track

from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.speech import corpus
from benchmark.shared.speech.examples import Example, ExampleMaker
from benchmark.shared.speech.synthesis import UNHEARD_VOICES
from benchmark.shared.speech.wav import to_pcm, wav_bytes
from benchmark.shared.word_errors import WordErrors, count_errors
from cluster.common.settings_sources import load_settings
from cluster.demo.recipe.train import CHECKPOINT
from cluster.demo.samples import words_of
from cluster.serve.in_process import local_transcriber
from router.api.params import TranscriptionParams
from router.interface import RequestContext
from router.transcript import Transcript

SHAPES = Path(__file__).parent / "shapes.txt"
AT_ONCE = 4  # files in flight
NO_DEADLINE_S = 24 * 3600.0


@dataclass(slots=True)
class Score:
    """answered: windows whose text is not empty; matched: windows with as many segments as there
    were sentences; gaps_s: distances of their starts and of their ends from the true ones.
    """

    errors: WordErrors = field(default_factory=WordErrors)
    answered: int = 0
    matched: int = 0
    gaps_s: list[tuple[float, float]] = field(default_factory=list)


def errors_of(said: str, heard: str) -> WordErrors:
    return count_errors(" ".join(words_of(said)), " ".join(words_of(heard)))


def score(examples: Sequence[Example], heard: Iterable[Transcript]) -> Score:
    found = Score()
    for example, one in zip(examples, heard, strict=True):
        found.errors += errors_of(example.text, one.text)
        found.answered += bool(words_of(one.text))
        if one.segments and len(one.segments) == len(example.segments):
            found.matched += 1
            for segment, (start, end, _) in zip(one.segments, example.segments, strict=True):
                found.gaps_s.append((abs(segment.start - start), abs(segment.end - end)))
    return found


def hear_served(checkpoint: Path, examples: Sequence[Example]) -> list[Transcript]:
    """Windows through the whole served path in this process, by the server's defaults."""
    settings = load_settings(None, {"model": str(checkpoint)}, environ={})
    params = TranscriptionParams(model="demo", seed=0)

    async def hear_all() -> list[Transcript]:
        slots = asyncio.Semaphore(AT_ONCE)
        async with local_transcriber(settings) as transcriber:

            async def hear(example: Example, file: Path) -> Transcript:
                async with slots:
                    content = wav_bytes(to_pcm(example.audio))
                    await asyncio.to_thread(file.write_bytes, content)
                    context = RequestContext.unlimited(file.name, NO_DEADLINE_S)
                    return (await transcriber.transcribe(file, params, context)).transcript

            with tempfile.TemporaryDirectory(prefix="splitscribe-demo-") as folder:
                paths = [Path(folder) / str(index) for index in range(len(examples))]
                return await asyncio.gather(*map(hear, examples, paths))

    return asyncio.run(hear_all())


def make_sets(scale: float = 1.0) -> dict[str, list[Example]]:
    n, few = (max(1, round(count * scale)) for count in (500, 100))
    shapes = SHAPES.read_text().splitlines()
    made, free = ExampleMaker("made"), ExampleMaker("free")
    unheard, other = ExampleMaker("unheard"), ExampleMaker("shapes")
    several, empty = ExampleMaker("several"), ExampleMaker("empty")
    sets = {
        "made sentences": [made.alone(corpus.made_sentence) for _ in range(n)],
        "free order": [free.alone(corpus.free_order) for _ in range(n)],
    }
    for voice in UNHEARD_VOICES:
        for name, source in (("made", corpus.made_sentence), ("free", corpus.free_order)):
            sets[f"unheard {voice}, {name}"] = [unheard.alone(source, (voice,)) for _ in range(few)]
    sets["other shapes"] = [
        other.alone(lambda _, text=text: text)  # type: ignore[misc]
        for text in shapes[: max(1, round(len(shapes) * scale))]
    ]
    sets["20 to 30 s"] = [several.several(corpus.sentence) for _ in range(few)]
    sets["no speech"] = [empty.empty() for _ in range(few)]
    return sets


def evaluate(checkpoint: Path, scale: float) -> list[dict[str, Any]]:
    """Word error rates in percent; gaps over windows that have as many segments as sentences."""
    rows: list[dict[str, Any]] = []
    for name, examples in track(make_sets(scale).items(), "measuring"):
        found = score(examples, hear_served(checkpoint, examples))
        start_gaps_s, end_gaps_s = np.array(found.gaps_s or [(0.0, 0.0)]).T.tolist()
        rows.append(
            {
                "set": name,
                "windows": len(examples),
                "words": found.errors.words,
                "wer": round(found.errors.wer, 2),
                "answered": found.answered,
                "matched": found.matched,
                "median_start_gap_s": round(median(start_gaps_s), 3),
                "median_end_gap_s": round(median(end_gaps_s), 3),
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: smaller sets")
    arguments = parser.parse_args()
    rows = evaluate(arguments.checkpoint, arguments.scale)
    print_table(rows)
    print_result("demo_model", {"rows": rows})


if __name__ == "__main__":
    main()
