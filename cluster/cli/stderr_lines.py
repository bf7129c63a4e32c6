"""What `splitscribe serve` prints on stderr: its own lines and its workers', plain or JSON.

Workers' lines come without the coloured prefixes that Ray would put before them. Lines of Ray's
native part stay plain where the others are JSON.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.common.errors import SplitscribeError
from cluster.common.logs import JsonFormatter

LEVELS = {name[0]: name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
# How a line begins that tells its level: ours with the time, Serve's, that of Ray's native part.
TOLD = re.compile(
    rf"(?:\d{{4}}-\S+ \S+ )?({'|'.join(LEVELS.values())}) |\[\d{{4}}-\S+ \S+ ([DIWEC]) "
)
OWN = "splitscribe: "  # how lines of this process begin
HIDDEN = ("DEBUG", "INFO")


def level_of(line: str) -> str | None:
    """The level that a line tells; None: it is part of the one before, or of no log."""
    found = TOLD.match(line)
    return LEVELS[(found[1] or found[2])[0]] if found else None


class WorkerLines:
    """is_quiet: only errors, and lines of which nobody knows what they are. all_of_serve: also what
    Serve and Ray tell below warnings.
    """

    def __init__(self, *, is_quiet: bool, all_of_serve: bool) -> None:
        self.is_quiet = is_quiet
        self._all_of_serve = all_of_serve
        self._shows: dict[object, bool] = {}  # whether the last line of each process was shown

    def take(self, process: object, lines: list[str]) -> None:
        for line in lines:
            level = level_of(line)
            if level is not None:
                self._shows[process] = self._is_shown(line, level)
            elif line.strip() and not line[0].isspace():  # a traceback, or a library's own words
                self._shows[process] = True
            if self._shows.get(process, True):
                print(line, file=sys.stderr, flush=True)

    def _is_shown(self, line: str, level: str) -> bool:
        if self.is_quiet:
            return level in ("ERROR", "CRITICAL")
        return self._all_of_serve or level not in HIDDEN or line[0].isdigit()  # which is ours


def json_line(level: str, message: str, error: BaseException | None = None) -> str:
    """A line of this process, as its workers write theirs."""
    fields = {
        "name": "cluster.cli",
        "levelname": level,
        "msg": message,
        "exc_info": error and (type(error), error, error.__traceback__),
        "role": "serve",
        "replica": f"serve-{os.getpid()}",
        "request_id": "-",
    }
    return JsonFormatter().format(logging.makeLogRecord(fields)) + "\n"


class JsonLines(io.StringIO):
    """A file for a console of this process: each line becomes a JSON object on stderr."""

    def write(self, text: str, /) -> int:
        for line in text.splitlines():
            sys.stderr.write(json_line("INFO", line.removeprefix(OWN).strip()))
            sys.stderr.flush()
        return len(text)


@contextmanager
def json_error() -> Iterator[None]:
    """Write an error as a line of JSON, and raise SystemExit in its place."""
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, SplitscribeError)
        message = str(error) if is_ours else "the server has ended with an error"
        sys.stderr.write(json_line("ERROR", message, None if is_ours else error))
        raise SystemExit(1) from error
