"""Log lines with their request, role and replica; plain or JSON.

The request id comes from the running task's context, or from `extra={"request_id": ...}`. Other
items of `extra` are printed as well; those of `log_fields` only in JSON, as the message says the
same.

No line holds what a client sent. The message of an unexpected exception may quote it, so the router
logs only the exception's class and place.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from cluster.common.errors import SplitscribeError

NO_REQUEST = "-"

LogEncoding = Literal["plain", "json"]

_request_id: ContextVar[str] = ContextVar("splitscribe_request_id", default=NO_REQUEST)
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "asctime",
    "message",
    "request_id",
    "role",
    "replica",
    "taskName",
    "color_message",
    "log_fields",
}


@contextmanager
def request_scope(request_id: str) -> Iterator[None]:
    """Set the request id for the code inside and the tasks that it starts."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def current_request_id() -> str:
    return _request_id.get()


def log_fields(request_id: str | None = None, **fields: object) -> dict[str, object]:
    """`extra` for a line whose message says the same."""
    named = {} if request_id is None else {"request_id": request_id}
    return {**named, "log_fields": fields}


def configure_logging(
    level: str,
    packages: Iterable[str],
    *,
    role: str,
    replica: str,
    encoding: LogEncoding = "plain",
    quotes: bool = True,  # log what unexpected exceptions say, which may quote a request
    stream: TextIO | None = None,
) -> None:
    """Send only the log lines of `packages` to `stream` (stderr); replaces a former call."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if encoding == "json" else PlainFormatter())
    handler.addFilter(_Stamp(role, replica, quotes))
    for package in packages:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


class PlainFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO router/router-1 req_7f router.http: message key=value`"""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        who = "%(levelname)s %(role)s/%(replica)s %(request_id)s"
        super().__init__(f"%(asctime)s {who} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        extras = "".join(f" {name}={value}" for name, value in _extras(record).items())
        return super().formatMessage(record) + extras


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = vars(record)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **{name: told.get(name, NO_REQUEST) for name in ("role", "replica", "request_id")},
            "logger": record.name,
            "message": record.getMessage(),
            **told.get("log_fields", {}),
            **_extras(record),
        }
        raised = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        if trace := "\n".join(filter(None, (raised, stack))):
            line["exception"] = trace
        return json.dumps(line, ensure_ascii=False, default=str)


class _Stamp(logging.Filter):
    """Adds request id, role and replica to each record; takes out what must not be quoted."""

    def __init__(self, role: str, replica: str, quotes: bool) -> None:
        super().__init__()
        self._quotes = quotes
        self._role = role
        self._replica = replica

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = self._role
        record.replica = self._replica
        if not hasattr(record, "request_id"):
            record.request_id = _request_id.get()
        if record.exc_info and not self._quotes:
            error = record.exc_info[1]
            record.exc_text = "\n".join(_unquoted(error)) if error is not None else None
            record.exc_info = None  # also for later handlers (Serve's file): ours is the first
        return True


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """Items of `extra`, without those that begin with an underscore: Ray adds some."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD_FIELDS and not name.startswith("_")
    }


def _unquoted(error: BaseException) -> list[str]:
    """Format an exception with its causes and group: classes, places, and our own messages."""
    lines = []
    if (cause := error.__cause__ or error.__context__) is not None:
        lines += [*_unquoted(cause), "", "which led to:", ""]
    lines += [line.rstrip("\n") for line in traceback.format_tb(error.__traceback__)]
    ours = isinstance(error, SplitscribeError) and error.status >= 500
    lines.append(f"{type(error).__qualname__}{f': {error}' if ours else ''}")
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            lines += ["", "in it:", "", *_unquoted(inner)]
    return lines
