"""Live sessions for an hour without faults: every word is right, and memory stays flat.

    python -m tests.chaos.live_soak                       an hour, four sessions at once
    python -m tests.chaos.live_soak --minutes 15 --sessions 8 --out soak.json

Sessions begin one after another, so that many of them have come and gone at the end. Every half
minute the resident memory and the open files of each role are read; the slope leaves out the first
minutes, in which caches fill. The exit status tells whether all of it was right.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.live_load import LiveLoad, live_texts
from tests.chaos.load import Load
from tests.chaos.soak import MAX_GROWTH, slope_per_hour
from tests.chaos.target import Target, local_target

MEAN_S = 12.0  # of a session: three clips of 7 s for each one of 27 s, speech and silence
SAMPLE_S = 30.0
WARM_SHARE = 0.25  # of the samples; caches fill, and the allocator finds its size
END_S = 180.0

Sample = dict[str, Any]


def soak(target: Target, load: Load, minutes: float) -> list[Sample]:
    samples: list[Sample] = []
    began_s = time.monotonic()
    for number in range(1, round(60 * minutes / SAMPLE_S) + 1):
        time.sleep(max(0.0, began_s + number * SAMPLE_S - time.monotonic()))
        at_s = time.monotonic() - began_s
        samples.append({"at_s": at_s, "memory": target.memory_bytes(), "files": target.files()})
        verdicts = Counter(one.verdict or "open" for one in tuple(load.sent))
        total = sum(samples[-1]["memory"].values())
        print(f"{at_s / 60:.1f} min: {total / 2**20:.0f} MiB, {dict(verdicts)}", flush=True)
    load.pause()
    load.wait_for_answers(END_S)
    return samples


def outcome(samples: list[Sample], load: Load, minutes: float, sessions: int) -> dict[str, Any]:
    kinds = sorted(samples[-1]["memory"]) if samples else []
    warm = [samples[round(WARM_SHARE * len(samples)) :]]
    return {
        "benchmark": "live_soak",
        "minutes": minutes,
        "sessions_at_once": sessions,
        "sessions": dict(Counter(one.verdict or "open" for one in load.sent)),
        "bad": [one.detail for one in load.sent if one.verdict != "right"][:20],
        "growth_per_hour": slope_per_hour(warm, "memory"),
        "mib_per_hour": {
            kind: None if slope is None else slope / 2**20
            for kind in kinds
            for slope in [slope_per_hour(warm, "memory", kind)]
        },
        "files_per_hour": slope_per_hour(warm, "files"),
        "left_over": [],
        "samples": samples,
    }


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, default=4, help="at once, about")
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    args = parser.parse_args()
    with local_target() as target:
        texts = live_texts(target.url)
        with LiveLoad(target.url, texts, args.sessions / MEAN_S) as load:
            samples = soak(target, load, args.minutes)
        result = outcome(samples, load, args.minutes, args.sessions)
        result["left_over"] = target.left_over()
    line = json.dumps(result)
    print(line)
    if args.out:
        args.out.write_text(line + "\n")
    growth = result["growth_per_hour"]
    is_flat = growth is None or growth < MAX_GROWTH
    return 0 if is_flat and not result["bad"] and not result["left_over"] else 1


if __name__ == "__main__":
    sys.exit(main())
