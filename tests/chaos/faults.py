"""The faults, one class each. `undo`, where there is one, is called after `hold_s`."""

from __future__ import annotations

import os
import random
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import psutil
import torch

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.weights import load_tensors
from cluster.common.settings import BUNDLED_MODEL
from tests.chaos.load import Load
from tests.chaos.target import Target

WORKER_S, NODE_S = 10.0, 30.0  # recovery to reach
BURST_S = 5.0  # until a burst's requests are sent


@dataclass
class Fault:
    """title: with its fields in braces. limit_s: recovery to reach. hold_s: until `undo`."""

    title: ClassVar[str]
    limit_s: float = WORKER_S
    hold_s: float = 0.0

    @property
    def name(self) -> str:
        return self.title.format(**vars(self))

    def possible(self, target: Target) -> str:
        return ""

    def inject(self, target: Target, load: Load) -> None:
        raise NotImplementedError

    def undo(self, target: Target) -> None:
        return

    def lasts(self) -> bool:
        return False


@dataclass
class Kill(Fault):
    title = "kill {kind}"
    kind: str = "encoder"

    def possible(self, target: Target) -> str:
        return "" if target.processes(self.kind) else f"there is no {self.kind}"

    def inject(self, target: Target, load: Load) -> None:
        self._victim(target).kill()

    def _victim(self, target: Target) -> psutil.Process:
        found = target.processes(self.kind)
        if self.kind == "audio":  # one that has nothing to do may stand still: nobody waits for it
            return max(found, key=lambda one: sum(one.cpu_times()[:2]))
        return random.choice(found)


@dataclass
class Freeze(Kill):
    """SIGSTOP to one process of a kind, which never wakes up unless `hold_s` is given."""

    title = "freeze {kind}"
    _stopped: psutil.Process | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return super().name + (f" for {self.hold_s:g} s" if self.hold_s else "")

    def inject(self, target: Target, load: Load) -> None:
        self._stopped = self._victim(target)
        self._stopped.suspend()

    def undo(self, target: Target) -> None:
        if self._stopped is not None and self.hold_s:
            with suppress(psutil.Error):
                self._stopped.resume()


@dataclass
class BadWeights(Kill):
    """A worker's weights become NaN: it lives and says that it is well. Float32 on a CPU."""

    title = "bad weights in {kind}"
    kind: str = "decoder"
    limit_s: float = NODE_S
    _bad: psutil.Process | None = field(default=None, init=False)

    def possible(self, target: Target) -> str:
        return super().possible(target) or why_not(target.processes(self.kind)[0])

    def inject(self, target: Target, load: Load) -> None:
        self._bad = self._victim(target)
        assert overwrite_norm(self._bad, self.kind), "no weights are where they should be"

    def lasts(self) -> bool:
        return self._bad is not None and self._bad.is_running()


@dataclass
class FullSpool(Fault):
    title = "full upload disk for {hold_s:g} s"
    hold_s: float = 8.0

    def possible(self, target: Target) -> str:
        return "" if target.spool_bytes else "the upload disk is not ours to fill (needs root)"

    def inject(self, target: Target, load: Load) -> None:
        assert target.spool is not None
        with suppress(OSError), (target.spool / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))

    def undo(self, target: Target) -> None:
        assert target.spool is not None
        (target.spool / "filling").unlink(missing_ok=True)


@dataclass
class Burst(Fault):
    title = "burst of {n} requests"
    n: int = 60
    limit_s: float = NODE_S

    def inject(self, target: Target, load: Load) -> None:
        load.burst(self.n)


@dataclass
class KillAmidBurst(Kill):
    title = "kill {kind} amid {n} requests"
    n: int = 40
    limit_s: float = NODE_S

    def inject(self, target: Target, load: Load) -> None:
        load.burst(self.n)
        deadline_s = time.monotonic() + BURST_S
        while load.n_in_flight < self.n // 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._victim(target).kill()


@dataclass
class Both(Fault):
    title = "{first.name} + {second.name}"
    first: Fault = field(default_factory=Kill)
    second: Fault = field(default_factory=Kill)

    def __post_init__(self) -> None:
        self.limit_s = max(self.first.limit_s, self.second.limit_s)
        self.hold_s = max(self.first.hold_s, self.second.hold_s)

    def possible(self, target: Target) -> str:
        return self.first.possible(target) or self.second.possible(target)

    def inject(self, target: Target, load: Load) -> None:
        self.first.inject(target, load)
        self.second.inject(target, load)

    def undo(self, target: Target) -> None:
        self.first.undo(target)
        self.second.undo(target)

    def lasts(self) -> bool:
        return self.first.lasts() or self.second.lasts()


KINDS = ("encoder", "decoder", "audio", "router")
PAIRED: tuple[Fault, ...] = (  # what random pairs are made of
    *(Kill(kind=kind) for kind in KINDS),
    *(Freeze(kind=kind) for kind in KINDS),
    FullSpool(),
    Burst(n=30),
)


def single_faults() -> list[Fault]:
    kinds = (*KINDS, "proxy", "controller")
    return [
        *(Kill(kind=kind) for kind in kinds),
        *(Freeze(kind=kind) for kind in kinds[:-1]),
        Freeze(kind="controller", hold_s=20.0),
        Freeze(kind="encoder", hold_s=3.0),
        Freeze(kind="decoder", hold_s=3.0),
        Freeze(kind="gcs", hold_s=20.0),
        BadWeights(kind="decoder"),
        BadWeights(kind="encoder"),
        FullSpool(),
        Burst(),
    ]


def kept_faults() -> list[Fault]:
    return [
        KillAmidBurst(kind="encoder"),
        KillAmidBurst(kind="decoder"),
        Both(first=Freeze(kind="encoder", hold_s=3.0), second=Burst(n=30)),
    ]


def random_pairs(n: int, seed: int) -> list[Fault]:
    rng = random.Random(seed)
    return [Both(first=one, second=two) for one, two in (rng.sample(PAIRED, 2) for _ in range(n))]


def random_fault(seed: int, number: int) -> Fault:
    rng = random.Random(f"{seed}:{number}")
    single = [
        *PAIRED[: 2 * len(KINDS)],
        *(Freeze(kind=kind, hold_s=3.0) for kind in ("encoder", "decoder", "controller")),
        Kill(kind="controller"),
        *PAIRED[2 * len(KINDS) :],
    ]
    if rng.random() < 0.2:
        first, second = rng.sample(single, 2)
        return Both(first=first, second=second)
    return rng.choice(single)


PART_BYTES = 2**26  # that are searched at once


def overwrite_norm(process: psutil.Process, role: str) -> int:
    checkpoint = open_checkpoint(BUNDLED_MODEL)
    name = f"{role}.layer_norm.weight"
    weight = load_tensors(checkpoint, {name: checkpoint.tensors[name].shape})[name]
    nan = torch.full_like(weight, torch.nan)
    return _overwrite(process.pid, weight.numpy().tobytes(), nan.numpy().tobytes())


def why_not(process: psutil.Process) -> str:
    try:
        os.close(os.open(f"/proc/{process.pid}/mem", os.O_RDWR))
    except OSError as error:
        return f"the memory of process {process.pid} is not ours to write to: {error}"
    return ""


def _overwrite(pid: int, old: bytes, new: bytes) -> int:
    """Write `new` over each `old` in what is the process's own and writable; returns how many."""
    count, pattern = 0, re.compile(re.escape(old))
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, modes, *_ = line.split()
            begin, end = (int(address, 16) for address in span.split("-"))
            for start in range(begin, end, PART_BYTES) if modes == "rw-p" else ():
                try:
                    part = os.pread(memory, min(PART_BYTES + len(old), end - start), start)
                except OSError:  # given back since the map was read
                    break
                for found in pattern.finditer(part):
                    os.pwrite(memory, new, start + found.start())
                    count += 1
    finally:
        os.close(memory)
    return count
