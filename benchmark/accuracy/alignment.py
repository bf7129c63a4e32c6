"""How far the aligned times of a known text are from those of the recording's script.

    splitscribe serve &
    python -m benchmark.accuracy.alignment [--url http://127.0.0.1:8000]

Sends the bundled recordings with the sentences of their scripts to /v1/audio/alignments. A script's
sentence lasts as long as its synthetic sound, with the silence at its end. Prints the seconds
between starts and between ends, and one JSON line last.
"""

from __future__ import annotations

import json

import httpx
import numpy as np

from benchmark.shared.command import make_parser, print_result
from cluster.demo.samples import SAMPLES, sample_path


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of a server")
    url = f"{parser.parse_args().url.rstrip('/')}/v1/audio/alignments"
    apart: dict[str, list[float]] = {"start": [], "end": []}
    n_untimed = 0
    for name in SAMPLES:
        audio = sample_path(name)
        script = json.loads(audio.with_suffix(".json").read_text())["sentences"]
        form = {"model": "whisper-1", "lines": json.dumps([one["text"] for one in script])}
        answer = httpx.post(url, data=form, files={"file": audio.read_bytes()}, timeout=300.0)
        answer.raise_for_status()
        for line, one in zip(answer.json()["lines"], script, strict=True):
            if line["start"] is None:
                n_untimed += 1
                continue
            for edge, seconds in apart.items():
                seconds.append(abs(line[edge] - one[edge]))
    figures = {
        edge: {"median_s": round(float(np.median(each)), 3), "p95_s": round(_p95(each), 3)}
        for edge, each in apart.items()
    }
    for edge, found in figures.items():
        print(f"{edge}s: {found['median_s']} s apart in the median, {found['p95_s']} s at p95")
    print_result("alignment", {"sentences": len(apart["start"]), "untimed": n_untimed, **figures})


def _p95(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 95))


if __name__ == "__main__":
    main()
