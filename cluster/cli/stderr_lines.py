"""What `splitscribe serve` prints on stderr: its own lines and its workers', plain or JSON.

Workers' lines come without the coloured prefixes that Ray would put before them. Where lines are
JSON, all that this process writes to the descriptor goes through a thread, Ray's native part
included, and what is no JSON object is put into one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cluster.common.errors import SplitscribeError
from cluster.common.logs import JsonFormatter

LEVELS = {name[0]: name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
# How a line begins that tells its level: ours with the time, Serve's, that of Ray's native part.
TOLD = re.compile(
    rf"(?:\d{{4}}-\S+ \S+ )?({'|'.join(LEVELS.values())}) |\[\d{{4}}-\S+ \S+ ([DIWEC]) "
)
OWN = "splitscribe: "  # how lines of this process begin
HIDDEN = ("DEBUG", "INFO")
SLOWEST_S = 2.0  # to write what is left at the end


def level_of(line: str) -> str | None:
    """The level that a line tells; None: it is part of the one before, or of no log."""
    if line.startswith(OWN):
        return "INFO"
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


@contextmanager
def json_stderr() -> Iterator[None]:
    """While open, each line of this process's stderr is one JSON object; an error's is
    SystemExit's.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    copying = threading.Thread(target=_copy, args=(reading, kept), name="stderr", daemon=True)
    copying.start()
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, SplitscribeError)
        message = str(error) if is_ours else "the server has ended with an error"
        _write(kept, json_line("ERROR", message, None if is_ours else error))
        raise SystemExit(1) from error
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)  # the last end of the pipe, unless a process of Ray's has one
        copying.join(SLOWEST_S)


def _copy(reading: int, to: int) -> None:
    level = "ERROR"
    with open(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = line.rstrip("\n")
            if not text.strip():
                continue
            if not _is_object(text):
                level = level_of(text) or (level if text[0].isspace() else "ERROR")
                line = json_line(level, text.removeprefix(OWN).strip())
            _write(to, line)


def _is_object(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        return text.startswith("{") and isinstance(json.loads(text), dict)
    return False


def _write(to: int, line: str) -> None:
    with suppress(OSError):  # whoever reads may have gone
        os.write(to, line.encode())
