"""The lines of a batch's output and error files, in OpenAI's form."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from router.api.batch_bodies import Status
from router.api.formats import to_json
from router.batches.work_queue import Result

GIVEN_UP: dict[Status, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": (
        "batch_cancelled",
        "This request was not executed, or not to its end, because the batch was cancelled.",
    ),
}


def request_id(batch_id: str, number: int) -> str:
    """What a line is called in results and in logs; the same whenever it is run."""
    return hashlib.sha256(f"{batch_id}/{number}".encode()).hexdigest()[:24]


def result_of(batch_id: str, number: int, custom_id: str, status: int, body: object) -> str:
    """The line of a request that was answered."""
    response = {
        "status_code": status,
        "request_id": f"req_{request_id(batch_id, number)}",
        "body": body,
    }
    return _line(batch_id, number, custom_id, response, None)


def not_run(batch_id: str, number: int, custom_id: str, ends_as: Status) -> str:
    """The line of a request that was given up."""
    code, message = GIVEN_UP[ends_as]
    return _line(batch_id, number, custom_id, None, {"code": code, "message": message})


def file_lines(batch_id: str, ends_as: Status, results: Iterator[Result]) -> Iterator[bytes]:
    """The lines of a file, from the rows of its requests."""
    for number, custom_id, result in results:
        line = result if result is not None else not_run(batch_id, number, custom_id, ends_as)
        yield line.encode() + b"\n"


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
