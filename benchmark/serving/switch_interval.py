"""How long a thread that launches decode steps waits for Python, by the interpreter's interval.

Each step waits 2 ms, as for a device, and then needs Python for 0.15 ms. Two other threads take
Python for a burst, as an encoder's thread and an event loop do, and then wait. The interpreter asks
a thread to let go after an interval, 5 ms unless somebody says otherwise; a colocated worker says
`cluster.serve.replicas.colocated_replica.SWITCH_S`. The intervals take turns.

    python -m benchmark.serving.switch_interval [--seconds 1.5] [--rounds 3]

Prints the ceiling, steps/s with nobody beside it, then for each burst and interval the median of
steps/s, of the others' work as a share of that at 5 ms, and of the 95th percentile of the delay.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from dataclasses import dataclass

from benchmark.shared.command import make_parser, print_result
from cluster.serve.replicas.colocated_replica import SWITCH_S

STEP_S, HOST_S = 0.002, 0.00015
INTERVALS = (0.005, 0.001, SWITCH_S, 0.0001)
BURSTS = ((0.0005, 0.002), (0.003, 0.003), (0.02, 0.005))  # of Python, and the wait after it


@dataclass(frozen=True, slots=True)
class Run:
    """steps, work: per second; delay_ms: the 95th percentile of what a step came too late."""

    steps: float
    work: float
    delay_ms: float


def busy(seconds: float) -> int:
    """Python for so long; the turns of its loop."""
    turns, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        turns += 1
    return turns


def run(interval: float, burst: tuple[float, float] | None, seconds: float) -> Run:
    """All threads for so long."""
    stop = threading.Event()
    delays: list[float] = []
    work: list[int] = []

    def step() -> None:
        while not stop.is_set():
            begun = time.perf_counter()
            time.sleep(STEP_S)
            delays.append(time.perf_counter() - begun - STEP_S)
            busy(HOST_S)

    def other(burst_s: float, wait_s: float) -> None:
        while not stop.is_set():
            work.append(busy(burst_s))
            time.sleep(wait_s)

    threads = [threading.Thread(target=step)]
    if burst is not None:
        threads += [threading.Thread(target=other, args=burst) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    late = sorted(delays)[int(0.95 * len(delays))]
    return Run(len(delays) / seconds, sum(work) / seconds, 1000 * late)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each interval")
    args = parser.parse_args()
    ceiling = run(INTERVALS[0], None, args.seconds).steps
    print(f"alone: {ceiling:.0f} steps/s")
    rows = []
    for burst in BURSTS:
        turns = [[run(i, burst, args.seconds) for i in INTERVALS] for _ in range(args.rounds)]
        for place, interval in enumerate(INTERVALS):
            own = [turn[place] for turn in turns]
            row = {
                "burst_ms": 1000 * burst[0],
                "interval_ms": 1000 * interval,
                "steps_per_s": round(statistics.median(one.steps for one in own), 1),
                "share_of_work": round(
                    statistics.median(turn[place].work / turn[0].work for turn in turns), 2
                ),
                "delay_ms": round(statistics.median(one.delay_ms for one in own), 2),
            }
            rows.append(row)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    print_result("switch_interval", {"alone": round(ceiling, 1), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
