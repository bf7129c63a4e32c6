"""Measure a demo checkpoint on new speech, as it is served.

    python -m benchmark.accuracy.demo_model [--checkpoint DIR] [--scale 1.0]

The sets are made sentences, words in free order, both by voices that training never heard,
sentences of other shapes (`shapes.txt`), windows of 20 to 30 s with several sentences, and windows
without speech. Word error rates are of lowercase text without punctuation. Prints a table, and one
JSON line last.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.speech import corpus
from benchmark.shared.speech.examples import Example, ExampleMaker
from benchmark.shared.speech.synthesis import UNHEARD_VOICES
from benchmark.shared.speech.wav import to_pcm, wav_bytes
from benchmark.shared.word_errors import WordErrors, count_errors, total
from cluster.common.settings import BUNDLED_MODEL
from cluster.common.settings_sources import load_settings
from cluster.demo.samples import words_of
from cluster.serve.in_process import local_transcriber
from router.api.params import TranscriptionParams
from router.interface import RequestContext
from router.transcript import Transcript

SHAPES = Path(__file__).parent / "shapes.txt"
AT_ONCE = 4  # files in flight
NO_DEADLINE_S = 24 * 3600.0


def errors_of(said: str, heard: str) -> WordErrors:
    return count_errors(" ".join(words_of(said)), " ".join(words_of(heard)))


def measured(examples: Sequence[Example], heard: Sequence[Transcript]) -> dict[str, Any]:
    """Compare transcripts with what was said. `answered` counts windows with a text, `matched`
    those with as many segments as sentences, whose edges give the gaps in seconds.
    """
    pairs = list(zip(examples, heard, strict=True))
    errors = total(errors_of(example.text, one.text) for example, one in pairs)
    matched = [
        (one.segments, example.segments)
        for example, one in pairs
        if one.segments and len(one.segments) == len(example.segments)
    ]
    gaps_s = [
        (abs(segment.start - start), abs(segment.end - end))
        for segments, said in matched
        for segment, (start, end, _) in zip(segments, said, strict=True)
    ]
    start_gap_s, end_gap_s = np.median(gaps_s or [(0.0, 0.0)], axis=0).tolist()
    return {
        "windows": len(examples),
        "words": errors.words,
        "wer": round(errors.wer, 2),
        "answered": sum(bool(words_of(one.text)) for one in heard),
        "matched": len(matched),
        "median_start_gap_s": round(start_gap_s, 3),
        "median_end_gap_s": round(end_gap_s, 3),
    }


def hear_served(checkpoint: str, examples: Sequence[Example]) -> list[Transcript]:
    settings = load_settings(None, {"model": checkpoint}, environ={})
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoint", default=BUNDLED_MODEL, help="folder, or 'demo'")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: smaller sets")
    asked = parser.parse_args()
    rows = [
        {"set": name, **measured(examples, hear_served(asked.checkpoint, examples))}
        for name, examples in track(make_sets(asked.scale).items(), "measuring")
    ]
    print_table(rows)
    print_result("demo_model", {"rows": rows})


if __name__ == "__main__":
    main()
