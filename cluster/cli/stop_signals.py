"""SIGINT and SIGTERM while a server runs: either asks it to stop, whenever and however often.

A signal handler in Python runs in the main thread between two of its instructions, and the code
that it interrupts may hold any lock. So the handlers here do nothing. Python's own handler, in C,
writes the number of the signal into a pipe, and a thread that reads the pipe does the rest. Knows
nothing of what is stopped.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_LIMIT_S = 90.0  # replicas get 60 s for the windows that they have begun
CLOSED = 0  # the byte that ends the reading thread: no signal has this number
GAVE_UP = 1  # the exit status where stopping took too long


class StopSignals:
    """While open, the first signal sets the event and begins the time limit; more change nothing.

    After a signal both stay ignored when it closes, so that none can end the process with another
    status while the interpreter shuts down.
    """

    def __init__(
        self, limit_s: float = STOP_LIMIT_S, give_up: Callable[[int], object] = os._exit
    ) -> None:
        """give_up: ends the process with a status; called if it still runs after the limit."""
        self._limit_s = limit_s
        self._give_up = give_up
        self._asked = threading.Event()
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)

    def __enter__(self) -> threading.Event:
        """The event that a signal sets. Only the main thread may open this."""
        self._terminal = os.dup(2)  # the cluster's shutdown silences the usual descriptors
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._former_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, _do_nothing) for number in SIGNALS}
        self._thread.start()
        return self._asked

    def __exit__(self, *exception: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_IGN if self._asked.is_set() else former)
        signal.set_wakeup_fd(self._former_fd)
        os.write(self._writing, bytes([CLOSED]))
        self._thread.join()
        for descriptor in (self._reading, self._writing, self._terminal):
            os.close(descriptor)

    def _read(self) -> None:
        deadline_s: float | None = None
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not select.select([self._reading], [], [], left_s)[0]:
                self._tell(f"not stopped within {self._limit_s:.0f} s: ending the process now")
                self._give_up(GAVE_UP)
                return
            for number in os.read(self._reading, 64):
                if number == CLOSED:
                    return
                if number in SIGNALS and deadline_s is None:
                    deadline_s = time.monotonic() + self._limit_s
                    self._asked.set()
                    self._tell(
                        f"{signal.Signals(number).name}: stopping, which ends within "
                        f"{self._limit_s:.0f} s; another signal changes nothing"
                    )

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may have gone
            os.write(self._terminal, f"splitscribe: {line}\n".encode())


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Without a handler in Python, Python's handler in C would write no byte."""
