"""The one thread that owns a wire, for an exporter or an importer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from cluster.errors import ConfigurationError, SplitscribeError

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 60.0  # for a transport to start
CLOSE_TIMEOUT_S = 10.0  # for it to stop


class RunsWire(Protocol):
    """What runs a wire: a thread, or on a virtual clock whoever made it.

    failure: None when well, else why it ended.
    """

    failure: str | None

    def join(self) -> None:
        """Wait for the end of what was told to end."""


# From the owner's name, and what is called at the start, until it returns, and at the end.
MakeThread = Callable[
    [str, Callable[[], None], Callable[[], None], Callable[[], None]],
    RunsWire,
]


class WireThread:
    """Calls `start`, then `run` until it returns or raises, then `end`.

    failure: None when well, else why the thread died.
    """

    def __init__(
        self,
        owner: str,
        start: Callable[[], None],
        run: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """Return when `start` has returned; `owner` is for messages.

        Raises:
            ConfigurationError: `start` raised; a SplitscribeError comes as it is.
        """
        self.failure: str | None = None
        self._owner = owner
        self._started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(start, run, end), name=f"kv-{owner}", daemon=True
        )
        self._thread.start()
        self._started.result(OPEN_TIMEOUT_S)

    def join(self) -> None:
        """Wait for the end of a thread whose `run` was told to return."""
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the KV %s's thread did not stop in %.0f s", self._owner, CLOSE_TIMEOUT_S)

    def _live(
        self, start: Callable[[], None], run: Callable[[], None], end: Callable[[], None]
    ) -> None:
        try:
            start()
        except SplitscribeError as error:
            self._started.set_exception(error)
            return
        except Exception as error:
            message = f"the KV transport could not start: {error!r}"
            self._started.set_exception(ConfigurationError(message))
            return
        self._started.set_result(None)
        try:
            run()
        except Exception as error:
            logger.exception("the KV %s's thread died", self._owner)
            self.failure = f"the KV {self._owner}'s thread died: {error}"
        finally:
            end()
