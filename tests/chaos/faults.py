"""The faults, one class each: what breaks, and what an operator or a supervisor does about it.

A fault is injected while the load runs. `undo`, where there is one, is called after `hold_s`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from tests.chaos.load import Load
from tests.chaos.target import Target

WORKER_S, NODE_S = 10.0, 30.0  # recovery to reach
BURST_S = 5.0  # until a burst's requests are sent

Pick = Callable[[list[psutil.Process]], psutil.Process]


class Fault(Protocol):
    """What `tests.chaos.campaign` needs of one."""

    @property
    def name(self) -> str: ...

    @property
    def limit_s(self) -> float:
        """Recovery to reach."""

    @property
    def hold_s(self) -> float:
        """How long it lasts before it is undone."""

    def possible(self, target: Target) -> str:
        """Why it cannot be had here; empty: it can."""

    def inject(self, target: Target, load: Load) -> None: ...

    def undo(self, target: Target) -> None: ...


@dataclass
class FaultBase:
    """Nothing to undo: what broke is replaced by the cluster itself."""

    limit_s: float = WORKER_S
    hold_s: float = 0.0

    @property
    def name(self) -> str:
        raise NotImplementedError

    def possible(self, target: Target) -> str:
        return ""

    def inject(self, target: Target, load: Load) -> None:
        raise NotImplementedError

    def undo(self, target: Target) -> None:
        return


@dataclass
class Kill(FaultBase):
    """SIGKILL to one process of a kind."""

    kind: str = "encoder"

    @property
    def name(self) -> str:
        return f"kill {self.kind}"

    def possible(self, target: Target) -> str:
        return "" if target.processes(self.kind) else f"there is no {self.kind}"

    def inject(self, target: Target, load: Load) -> None:
        self._victim(target).kill()

    def _victim(self, target: Target) -> psutil.Process:
        return random.choice(target.processes(self.kind))


@dataclass
class Freeze(Kill):
    """SIGSTOP to one process of a kind, which never wakes up unless `hold_s` is given."""

    _stopped: psutil.Process | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"freeze {self.kind}" + (f" for {self.hold_s:g} s" if self.hold_s else "")

    def inject(self, target: Target, load: Load) -> None:
        self._stopped = self._victim(target)
        self._stopped.suspend()

    def undo(self, target: Target) -> None:
        if self._stopped is not None and self.hold_s:
            with suppress(psutil.Error):
                self._stopped.resume()


@dataclass
class FullSpool(FaultBase):
    """No byte is left where uploads are stored."""

    hold_s: float = 8.0

    @property
    def name(self) -> str:
        return f"full upload disk for {self.hold_s:g} s"

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
class Burst(FaultBase):
    """Many times more requests at once than both page pools hold windows."""

    n: int = 60
    limit_s: float = NODE_S

    @property
    def name(self) -> str:
        return f"burst of {self.n} requests"

    def inject(self, target: Target, load: Load) -> None:
        load.burst(self.n)


@dataclass
class KillAmidBurst(Kill):
    """SIGKILL to one process of a kind once many requests more than usual are in flight."""

    n: int = 40
    limit_s: float = NODE_S

    @property
    def name(self) -> str:
        return f"kill {self.kind} amid {self.n} requests"

    def inject(self, target: Target, load: Load) -> None:
        load.burst(self.n)
        deadline_s = time.monotonic() + BURST_S
        while load.n_in_flight < self.n // 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._victim(target).kill()


@dataclass
class Both(FaultBase):
    """Two faults at once."""

    first: Fault = field(default_factory=Kill)
    second: Fault = field(default_factory=Kill)

    def __post_init__(self) -> None:
        self.limit_s = max(self.first.limit_s, self.second.limit_s)
        self.hold_s = max(self.first.hold_s, self.second.hold_s)

    @property
    def name(self) -> str:
        return f"{self.first.name} + {self.second.name}"

    def possible(self, target: Target) -> str:
        return self.first.possible(target) or self.second.possible(target)

    def inject(self, target: Target, load: Load) -> None:
        self.first.inject(target, load)
        self.second.inject(target, load)

    def undo(self, target: Target) -> None:
        self.first.undo(target)
        self.second.undo(target)
