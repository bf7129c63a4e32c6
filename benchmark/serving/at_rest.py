"""What a server takes while nobody asks it anything: memory, processor time, its start.

Starts `splitscribe serve` twice, the first time only so that compiled kernels are cached. Of the
second start it measures the seconds until it is ready, the first request beside later ones, of
which no two have the same audio, and then, while nothing comes, the memory of every process (PSS:
what several processes map counts in parts) and the processor time that each takes. There is no
rival beside it: compare the figures with those of another version, on the same machine.

    python -m benchmark.serving.at_rest [--seconds 60] [--model DIR] [-- SERVE FLAGS]

Prints a table by kind of process, and one JSON line last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmark.shared.clips import Clip
from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.server import BenchServer, process_kind, serving
from benchmark.shared.speech.wav import wav_bytes
from cluster.demo.samples import sample_path
from cluster.demo.showcase import parse_server_timing

SETTLE_S = 15.0  # from the last request: what ends a while after work has ended by then


@dataclass(slots=True)
class Kind:
    processes: int = 0
    pss_mb: float = 0.0
    anonymous_mb: float = 0.0  # of it, what no file holds
    shared_mb: float = 0.0  # of it, shared memory: the pools of KV, Ray's object store
    cores: float = 0.0


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of rest that are measured")
    parser.add_argument("--requests", type=int, default=6, help="before it, one after another")
    parser.add_argument("--model", help="as of `splitscribe serve`; default: the bundled one")
    parser.add_argument("--cold", action="store_true", help="leave out the start before")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("flags", nargs="*", help="more flags of `splitscribe serve`, after --")
    args = parser.parse_args()
    flags = [*([args.model] if args.model else []), *args.flags]
    if not args.cold:
        with serving(*flags) as server:
            ask(server.url, 0)
    figures = measure(flags, args.seconds, args.requests)
    print_table({"processes of": name, **kind} for name, kind in figures["kinds"].items())
    print_table([{k: v for k, v in figures.items() if k not in ("flags", "kinds")}])
    print_result("at_rest", {**cpu_info(), **versions("ray", "torch"), **figures}, args.json)


def measure(flags: Sequence[str], seconds: float, n_requests: int) -> dict[str, Any]:
    began_s = time.monotonic()
    with serving(*flags) as server:
        ready_s = time.monotonic() - began_s
        taken_ms, stages_ms = zip(*(ask(server.url, n) for n in range(n_requests)), strict=True)
        time.sleep(SETTLE_S)
        kinds = at_rest(server, seconds)
    return {
        "flags": list(flags),
        "ready_s": round(ready_s, 2),
        "first_ms": round(taken_ms[0], 1),
        "second_ms": round(taken_ms[1], 1),
        "later_ms": round(statistics.median(taken_ms[1:]), 1),
        "first_stages_ms": stages_ms[0],
        "second_stages_ms": stages_ms[1],
        "pss_mb": round(sum(kind.pss_mb for kind in kinds.values()), 1),
        "busy_cores": round(sum(kind.cores for kind in kinds.values()), 4),
        "kinds": {name: _rounded(kind) for name, kind in kinds.items()},
    }


def ask(url: str, number: int) -> tuple[float, dict[str, float]]:
    """Send the short recording, another one by a click for each number.

    Returns milliseconds until the answer, and of each stage, as the server tells them.
    """
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
    latency_ms = 1000 * (time.perf_counter() - began_s)
    return latency_ms, parse_server_timing(answer.headers.get("server-timing", ""))


def at_rest(server: BenchServer, seconds: float) -> dict[str, Kind]:
    """Every process of a server by its kind: its memory now, its processor time from now on."""
    processes = [server.process, *server.process.children(recursive=True)]
    kinds: dict[str, Kind] = {}
    for process in processes:
        with suppress(psutil.Error, OSError):
            kind = kinds.setdefault(process_kind(process, server.process), Kind())
            memory = _memory_mb(process.pid)
            kind.processes += 1
            kind.pss_mb += memory["Pss"]
            kind.anonymous_mb += memory.get("Pss_Anon", 0.0)
            kind.shared_mb += memory.get("Pss_Shmem", 0.0)
    before_s, began_s = _cpu_s(processes), time.monotonic()
    time.sleep(seconds)
    after_s, lasted_s = _cpu_s(processes), time.monotonic() - began_s
    for process in processes:
        if process.pid in after_s:
            kind = kinds[process_kind(process, server.process)]
            kind.cores += (after_s[process.pid] - before_s[process.pid]) / lasted_s
    return dict(sorted(kinds.items(), key=lambda item: -item[1].pss_mb))


def _memory_mb(pid: int) -> dict[str, float]:
    """The kernel's sums over all mappings of a process, by their names, in MB."""
    fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return {f[0].rstrip(":"): int(f[1]) * 1024 / 1e6 for f in fields if f[-1] == "kB"}


def _cpu_s(processes: Sequence[psutil.Process]) -> dict[int, float]:
    seconds = {}
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds[process.pid] = times.user + times.system
    return seconds


def _rounded(kind: Kind) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(kind).items()}


if __name__ == "__main__":
    main()
