"""Checks the lines of a batch's input file, and formats the lines of its result files.

An input line is `{custom_id, method, url, body}`. As at OpenAI, an error found here fails the whole
batch. Other fields of the body are checked when the line is run, and fail only that line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from cluster.common.errors import InvalidRequestError, PayloadTooLargeError, SplitscribeError
from router.api.batch_bodies import BatchError, Status
from router.api.documents import AUDIO_FIELD, DATA_PART, MAX_URL, is_data_url, read_json
from router.api.formats import to_json
from router.batches.store import NewLine, OpenBatch
from router.batches.work_queue import Result

FILE_ID = "file_id"
REFERENCES = "known_speaker_references"
URLS = ("file_url", "url")
SOURCES = (FILE_ID, *URLS, AUDIO_FIELD)  # a body has exactly one of these fields
MAX_ERRORS = 100  # errors that a batch lists
MAX_CUSTOM_ID = 512  # characters
MAX_LINE_BYTES = 64 * 1024 * 1024  # audio included
MAX_OTHER_BYTES = 1024 * 1024  # of a line, without its audio
_LONG_TEXTS = (("body", AUDIO_FIELD, DATA_PART), *(("body", name) for name in URLS))
_LINE_FIELDS = ("custom_id", "method", "url", "body")
GIVEN_UP: dict[Status, str] = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, or not to its end, because the batch was "
    "cancelled.",
}


class Models(Protocol):
    def find(self, name: str) -> object:
        """Raises ModelNotFoundError."""


@dataclass(slots=True)
class CheckedInput:
    lines: list[NewLine] = field(default_factory=list)
    errors: list[BatchError] = field(default_factory=list)
    model: str | None = None  # as the first line spells it


def check_input(path: Path, endpoint: str, models: Models, max_lines: int) -> CheckedInput:
    """Check the lines until `MAX_ERRORS` are wrong. More than `max_lines` give one error, which
    replaces the others. Blocks for seconds if the file is large.
    """
    found = CheckedInput()
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        for number, offset, content in _lines(file):
            try:
                custom_id, model = _check_line(parse_line(content), endpoint, models)
                if custom_id in seen:
                    raise _refused(
                        "duplicate_custom_id",
                        f"custom_id {custom_id!r} is that of line {seen[custom_id]} too",
                        "custom_id",
                    )
            except InvalidRequestError as error:
                found.errors.append(_told(error, number))
                if len(found.errors) == MAX_ERRORS:
                    break
                continue
            seen[custom_id] = number
            found.model = found.model or model
            found.lines.append(NewLine(number, custom_id, offset, len(content)))
            if len(found.lines) > max_lines:
                message = (
                    f"the file has more than {max_lines} lines, the most that a batch may have"
                )
                found.errors = [_told(_refused("too_many_lines", message), number)]
                break
    if not found.lines and not found.errors:
        found.errors = [_told(_refused("empty_file", "the file has no line"))]
    return found


def _refused(code: str, message: str, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code=code)


def _told(error: InvalidRequestError, line: int | None = None) -> BatchError:
    return BatchError(
        code=error.code or error.type, message=error.message, param=error.param, line=line
    )


def parse_line(content: bytes) -> dict[str, Any]:
    """Raises InvalidRequestError."""
    if len(content) > MAX_LINE_BYTES:
        raise _refused(
            "line_too_long",
            f"the line has more than {MAX_LINE_BYTES} bytes; name its audio by file_id or URL",
        )
    try:
        document = read_json(content, MAX_OTHER_BYTES, *_LONG_TEXTS)
    except PayloadTooLargeError as error:
        raise _refused("line_too_long", f"the line is too long: {error.message}") from None
    except InvalidRequestError as error:
        raise _refused("invalid_json_line", error.message) from None
    except ValueError as error:
        raise _refused("invalid_json_line", f"the line is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _refused("invalid_json_line", "the line is not a JSON object")
    return document


def source_of(body: Mapping[str, Any]) -> str:
    """Return the name of the body's audio field. Raises InvalidRequestError."""
    named = [name for name in SOURCES if body.get(name) is not None]
    if len(named) != 1:
        came = f"it has {' and '.join(named)}" if named else "it has none of them"
        raise _refused(
            "invalid_audio_source",
            f"the body names its audio by one of {', '.join(SOURCES)}; {came}",
            f"body.{named[1]}" if named else "body",
        )
    (name,) = named
    if name != AUDIO_FIELD and not isinstance(body[name], str):
        raise _refused("invalid_type", f"'{name}' must be a text", f"body.{name}")
    if name in URLS and len(body[name]) > MAX_URL and not is_data_url(body[name]):
        raise _refused("invalid_url", f"'{name}' is longer than {MAX_URL}", f"body.{name}")
    return name


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number from 1, byte offset, content) of each line that is not blank."""
    offset = number = 0
    while content := file.readline(MAX_LINE_BYTES + 2):
        number += 1
        stripped = content.strip()
        if stripped:
            yield number, offset, content
        offset += len(content)


def _check_line(document: Mapping[str, Any], endpoint: str, models: Models) -> tuple[str, str]:
    if unknown := document.keys() - set(_LINE_FIELDS):
        name = min(unknown)[:64]
        raise _refused("unknown_parameter", f"a line has no field {name!r}", name)
    custom_id = _text(document, "custom_id")
    if len(custom_id) > MAX_CUSTOM_ID:
        raise _refused(
            "invalid_custom_id",
            f"custom_id has more than {MAX_CUSTOM_ID} characters",
            "custom_id",
        )
    if (method := _text(document, "method")) != "POST":
        raise _refused("invalid_method", f"method must be POST, not {method[:64]!r}", "method")
    if (url := _text(document, "url")) != endpoint:
        raise _refused(
            "invalid_url", f"url must be the batch's endpoint {endpoint}, not {url[:64]!r}", "url"
        )
    body = document.get("body")
    if not isinstance(body, dict):
        raise _refused("missing_required_parameter", "'body' must be an object", "body")
    if any(name.partition("[")[0] == REFERENCES for name in body):
        raise _refused(
            "unsupported_value",
            f"'{REFERENCES}' are not taken in batches, whose lines are kept: ask by a request",
            f"body.{REFERENCES}",
        )
    source_of(body)
    model = body.get("model")
    if not isinstance(model, str) or not model.strip():
        raise _refused("missing_required_parameter", "the body must name a 'model'", "body.model")
    try:
        models.find(model.strip())
    except SplitscribeError as error:
        raise _refused("model_not_found", error.message, "body.model") from None
    return custom_id, model.strip()


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not value:
        raise _refused("missing_required_parameter", f"the line needs a text as '{name}'", name)
    return value


def request_id(batch_id: str, number: int) -> str:
    """Return the line's id in results and logs, which is the same in every run."""
    return hashlib.sha256(f"{batch_id}/{number}".encode()).hexdigest()[:24]


def result_of(batch_id: str, number: int, custom_id: str, status: int, body: object) -> str:
    response = {
        "status_code": status,
        "request_id": f"req_{request_id(batch_id, number)}",
        "body": body,
    }
    return _line(batch_id, number, custom_id, response, None)


def file_lines(batch: OpenBatch, results: Iterator[Result]) -> Iterator[bytes]:
    """Yield the lines of a result file. Rows without a result get the batch's error."""
    for number, custom_id, result in results:
        if result is None:
            assert batch.ends_as is not None
            error = {"code": f"batch_{batch.ends_as}", "message": GIVEN_UP[batch.ends_as]}
            result = _line(batch.id, number, custom_id, None, error)
        yield result.encode() + b"\n"


def _line(
    batch_id: str,
    number: int,
    custom_id: str,
    response: dict[str, Any] | None,
    error: dict[str, str] | None,
) -> str:
    return to_json(
        {
            "id": f"batch_req_{request_id(batch_id, number)}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )
