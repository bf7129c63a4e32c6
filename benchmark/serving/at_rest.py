"""The memory, the processor time and the start of a server that gets no requests.

    python -m benchmark.serving.at_rest [--seconds 60] [-- SERVE FLAGS]

Starts `splitscribe serve` twice, the first time only so that compiled kernels are cached. Measures
the seconds until it is ready, the first request and later ones, and then, without requests, the
memory of every process (PSS: shared pages count in parts) and its processor time. There is no rival
beside it: compare the figures with another version's. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmark.shared.clips import Clip
from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.server import serving
from benchmark.shared.speech.wav import wav_bytes
from cluster.demo.samples import sample_path

N_REQUESTS = 6  # one after another
SETTLE_S = 15.0  # from the last request until delayed work has ended


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of rest that are measured")
    parser.add_argument("flags", nargs="*", help="more flags of `splitscribe serve`, after --")
    args = parser.parse_args()
    with serving(*args.flags) as server:
        ask(server.url, 0)
    figures = measure(args.flags, args.seconds)
    print_table({"processes of": name, **one} for name, one in figures["roles"].items())
    print_table([{k: v for k, v in figures.items() if k not in ("flags", "roles")}])
    print_result("at_rest", {**cpu_info(), **versions("ray", "torch"), **figures})


def measure(flags: Sequence[str], seconds: float) -> dict[str, Any]:
    began_s = time.monotonic()
    with serving(*flags) as server:
        ready_s = time.monotonic() - began_s
        taken_ms = [ask(server.url, n) for n in range(N_REQUESTS)]
        time.sleep(SETTLE_S)
        pss, before_s = server.pss_bytes(), server.cpu_s()
        time.sleep(seconds)
        cores = {
            role: (used_s - before_s.get(role, 0.0)) / seconds
            for role, used_s in server.cpu_s().items()
        }
    return {
        "flags": list(flags),
        "ready_s": round(ready_s, 2),
        "first_ms": round(taken_ms[0], 1),
        "second_ms": round(taken_ms[1], 1),
        "later_ms": round(statistics.median(taken_ms[1:]), 1),
        "pss_mb": round(sum(pss.values()) / 1e6, 1),
        "busy_cores": round(sum(cores.values()), 4),
        "roles": {
            role: {"pss_mb": round(n_bytes / 1e6, 1), "cores": round(cores.get(role, 0.0), 4)}
            for role, n_bytes in pss.items()
        },
    }


def ask(url: str, number: int) -> float:
    """Send the short recording with sample `number` changed, and return the milliseconds."""
    pcm = Clip("short", sample_path("short")).pcm()
    pcm[number] ^= 1
    audio, began_s = wav_bytes(pcm), time.perf_counter()
    answer = httpx.post(
        f"{url}/v1/audio/transcriptions",
        data={"model": "whisper-1", "language": "en"},
        files={"file": ("short.wav", audio)},
        timeout=300,
    )
    answer.raise_for_status()
    return 1000 * (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
