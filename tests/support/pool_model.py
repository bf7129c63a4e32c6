"""A cluster in numbers, for its scaling: workers that start late, queues, a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.serve.replica_count import (
    Balancer,
    Decision,
    DecoderSignals,
    EncoderSignals,
    PoolView,
    Role,
    ScalingRules,
)

STEP_S = 0.1
WINDOW_S = 0.1  # encoder seconds for a window
ROWS = 16  # of a decoder
DECODE_S = 1.0  # that a window holds a row
BUSY_STEPS = 50  # over which a worker tells its busy share
EXPORT_WINDOWS = 16  # published and not yet read, of one encoder


@dataclass
class Workers:
    start_s: float
    running: int
    starting: list[float] = field(default_factory=list)  # when each is ready

    @property
    def target(self) -> int:
        return self.running + len(self.starting)

    def resize(self, wanted: int, now_s: float) -> None:
        while self.target < wanted:
            self.starting.append(now_s + self.start_s)
        while self.target > wanted:
            if self.starting:
                self.starting.pop()
            else:
                self.running -= 1

    def tick(self, now_s: float) -> None:
        ready = [at_s for at_s in self.starting if at_s <= now_s]
        self.starting = [at_s for at_s in self.starting if at_s > now_s]
        self.running += len(ready)


@dataclass
class PoolModel:
    rules: dict[Role, ScalingRules]
    start_s: float = 2.0
    decode_s: float = DECODE_S
    now_s: float = 0.0
    queue: float = 0.0  # windows that wait for an encoder
    unread: float = 0.0  # published, waiting for rows
    worked: deque[float] = field(default_factory=deque)  # encoder seconds in each of the last steps
    rows: deque[tuple[float, float]] = field(default_factory=deque)  # (until, windows)
    history: list[tuple[float, Role, int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.balancer = Balancer()
        self.pools: dict[Role, Workers] = {
            role: Workers(self.start_s, rules.min_workers) for role, rules in self.rules.items()
        }

    @property
    def used(self) -> float:
        return sum(windows for _, windows in self.rows)

    def run(self, windows_per_step: Sequence[float]) -> None:
        for windows in windows_per_step:
            self.step(windows)

    def step(self, windows: float) -> None:
        self.now_s += STEP_S
        for workers in self.pools.values():
            workers.tick(self.now_s)
        while self.rows and self.rows[0][0] <= self.now_s:
            self.rows.popleft()
        self.queue += windows
        encoders, decoders = self.pools["encoder"].running, self.pools["decoder"].running
        room = encoders * EXPORT_WINDOWS - self.unread
        done = min(self.queue, encoders * STEP_S / WINDOW_S, max(0.0, room))
        self.queue -= done
        self.unread += done
        self.worked.append(done * WINDOW_S)
        if len(self.worked) > BUSY_STEPS:
            self.worked.popleft()
        read = min(self.unread, max(0.0, decoders * ROWS - self.used))
        self.unread -= read
        if read:
            self.rows.append((self.now_s + self.decode_s, read))
        self._decide()

    def _decide(self) -> None:
        for role, view in (("encoder", self._encoder_view()), ("decoder", self._decoder_view())):
            decision: Decision = self.balancer.decide(role, self.rules[role], view, self.now_s)  # type: ignore[arg-type]
            target = view.target
            if decision.workers != target:
                self.history.append(
                    (round(self.now_s, 1), role, target, decision.workers, decision.reason)  # type: ignore[arg-type]
                )
                self.pools[role].resize(decision.workers, self.now_s)  # type: ignore[index]

    def _encoder_view(self) -> PoolView:
        workers = self.pools["encoder"]
        if not workers.running:
            return PoolView(workers.target, self.queue * WINDOW_S, len(workers.starting))
        n = workers.running
        busy = sum(self.worked) / (len(self.worked) * STEP_S * n)
        one = EncoderSignals(
            min(1.0, busy),
            self.queue * WINDOW_S / n,
            unread=self.unread / (n * EXPORT_WINDOWS),
        )
        return PoolView(workers.target, 0.0, len(workers.starting), encoders=(one,) * n)

    def _decoder_view(self) -> PoolView:
        workers = self.pools["decoder"]
        if not workers.running:
            return PoolView(workers.target, self.unread / ROWS, len(workers.starting))
        n = workers.running
        one = DecoderSignals(self.used / (n * ROWS), self.unread / (n * ROWS))
        return PoolView(workers.target, 0.0, len(workers.starting), decoders=(one,) * n)

    def changes(self, role: Role) -> list[tuple[float, int, int]]:
        return [(at, before, after) for at, who, before, after, _ in self.history if who == role]

    def turns(self, role: Role) -> int:
        signs = [after > before for _, before, after in self.changes(role)]
        return sum(a != b for a, b in pairwise(signs))
