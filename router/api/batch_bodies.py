"""The bodies of `/v1/files` and `/v1/batches`, as OpenAI's API has them.

Fields are those of `openai.types.FileObject`, `openai.types.Batch` and their parameters. The store
keeps the same `FileObject` and `Batch`, and they cross between processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from cluster.common.errors import InvalidRequestError
from router.api.documents import refusal, repeated
from router.api.params import Operation

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
ENDPOINTS: dict[str, Operation] = {
    "/v1/audio/transcriptions": "transcribe",
    "/v1/audio/translations": "translate",
    "/v1/audio/alignments": "align",
}
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000  # OpenAI's
MAX_PAIRS = 16  # of metadata

Key = Annotated[str, StringConstraints(max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class ExpiresAfter(BaseModel):
    """The time at which a file expires."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


def expiry_s(after: ExpiresAfter | None) -> int | None:
    return None if after is None else after.seconds


class UploadFields(BaseModel):
    """The fields of an upload other than `file`."""

    model_config = ConfigDict(extra="forbid")

    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CreateBatchRequest(BaseModel):
    """The body of a request that creates a batch."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str = Field(max_length=80, description="a file with purpose `batch`")
    endpoint: Literal["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/alignments"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Value], Field(max_length=MAX_PAIRS)] | None = None
    output_expires_after: ExpiresAfter | None = None
    webhook_url: str | None = Field(
        None,
        max_length=2048,
        description="who is told of its end, on a host that the server allows; not in OpenAI's API",
    )


class FileObject(BaseModel):
    """One file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = Field(description="Unix time")
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class Page(BaseModel):
    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class FilePage(Page):
    """A page of files."""

    data: list[FileObject]


class BatchError(BaseModel):
    """A mistake in a batch's input. `line` counts from 1; null means the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class Batch(BaseModel):
    """One batch. Times are Unix times."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None
    paused: str | None = Field(
        None, description="why no line is run now, such as a full disk; not in OpenAI's API"
    )


class BatchPage(Page):
    """A page of batches, newest first."""

    data: list[Batch]


def parse_upload(pairs: Iterable[tuple[str, str]]) -> UploadFields:
    """Raises InvalidRequestError."""
    fields: dict[str, Any] = {}
    for name, text in pairs:
        key, bracket, part = name.partition("[")
        into = fields.setdefault(key, {}) if bracket else fields
        part = part.removesuffix("]") if bracket else key
        if not isinstance(into, dict) or part in into:
            raise repeated(name[:64])
        into[part] = text
    if isinstance(expiry := fields.get("expires_after"), str):
        try:
            fields["expires_after"] = json.loads(expiry)
        except (ValueError, RecursionError):
            raise InvalidRequestError(
                "'expires_after' must be an object of 'anchor' and 'seconds'", param="expires_after"
            ) from None
    try:
        return UploadFields.model_validate(fields)
    except ValidationError as error:
        raise refusal(error) from None
