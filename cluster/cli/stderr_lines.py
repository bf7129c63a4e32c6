"""The lines that `splitscribe serve` prints on stderr: its own and its workers', plain or JSON.

Lines of Ray's native part stay plain where the others are JSON.
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
# The beginning of a log line of splitscribe (after the time), of Serve, or of Ray's native part.
TOLD = re.compile(
    rf"(?:\d{{4}}-\S+ \S+ )?({'|'.join(LEVELS.values())}) |\[\d{{4}}-\S+ \S+ ([DIWEC]) "
)
OWN = "splitscribe: "  # the beginning of each line of this process
HIDDEN = ("DEBUG", "INFO")


def level_of(line: str) -> str | None:
    """The level of a log line; None: it continues the line before or is not a log line."""
    found = TOLD.match(line)
    return LEVELS[(found[1] or found[2])[0]] if found else None


class WorkerLines:
    """is_quiet: print only errors and lines that are no log lines. all_of_serve: also print what
    Serve and Ray log below warnings.
    """

    def __init__(self, *, is_quiet: bool, all_of_serve: bool) -> None:
        self.is_quiet = is_quiet
        self._all_of_serve = all_of_serve
        self._shows: dict[object, bool] = {}  # process -> whether its last line was shown

    def take(self, process: object, lines: list[str]) -> None:
        for line in lines:
            level = level_of(line)
            if level is not None:
                self._shows[process] = self._is_shown(line, level)
            elif line.strip() and not line[0].isspace():  # a traceback, or output of a library
                self._shows[process] = True
            if self._shows.get(process, True):
                print(line, file=sys.stderr, flush=True)

    def _is_shown(self, line: str, level: str) -> bool:
        if self.is_quiet:
            return level in ("ERROR", "CRITICAL")
        # Lines of splitscribe begin with the time.
        return self._all_of_serve or level not in HIDDEN or line[0].isdigit()


def json_line(level: str, message: str, error: BaseException | None = None) -> str:
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
    """A file for a console that writes each line as a JSON object to stderr."""

    def write(self, text: str, /) -> int:
        for line in text.splitlines():
            sys.stderr.write(json_line("INFO", line.removeprefix(OWN).strip()))
            sys.stderr.flush()
        return len(text)


@contextmanager
def json_error() -> Iterator[None]:
    """Write an exception as a line of JSON and raise SystemExit instead."""
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, SplitscribeError)
        message = str(error) if is_ours else "the server has ended with an error"
        sys.stderr.write(json_line("ERROR", message, None if is_ours else error))
        raise SystemExit(1) from error
