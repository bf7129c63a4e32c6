"""What `router.http` asks of files and batches, and what it is told of them.

A `BatchBackend` is one for a whole cluster: `router.batches.service` does the work in the process
that owns the folder, and `cluster.serve.batch_client` calls that one from each router. What crosses
is a frozen dataclass. `owner` names the API key whose object it is, by a digest; empty where there
are no keys. Ids are made by the caller, so that a call that got no answer can be repeated.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

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
Order = Literal["asc", "desc"]

ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
PIECE_BYTES = 1024 * 1024  # of an upload or a download that crosses at once
Item = TypeVar("Item")


def new_id(kind: str) -> str:
    """An id that nobody guesses, such as `file-` with 24 hexadecimal digits."""
    return f"{kind}{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of one key. Times are Unix seconds."""

    id: str
    purpose: str
    filename: str
    size_bytes: int
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class NewFile:
    """What is said of an upload once all of its bytes are there."""

    id: str
    purpose: str
    filename: str
    size_bytes: int
    expires_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class InputError:
    """What is wrong with a batch's input. line: counted from 1; None: with all of it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch to run. webhook_url: who is told of its end."""

    id: str
    input_file_id: str
    endpoint: str
    metadata: Mapping[str, str] | None = None
    output_expires_after_s: int | None = None
    webhook_url: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of one key, as OpenAI's `Batch`. `paused`: why its lines wait; not OpenAI's."""

    id: str
    input_file_id: str
    endpoint: str
    status: Status
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[InputError, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    times: Mapping[str, int] = field(default_factory=dict)  # such as in_progress_at
    paused: str | None = None


@dataclass(frozen=True, slots=True)
class Listing(Generic[Item]):
    """A page of a list."""

    items: tuple[Item, ...]
    has_more: bool


class BatchBackend(Protocol):
    """Files and batches of all keys. What another key owns is as if it were not there.

    Every method raises NotFoundError for an object that is not there, InsufficientStorageError
    where the disk or a quota is full, and OverloadedError where the owner cannot be reached now.
    """

    async def begin_upload(self, owner: str, upload_id: str, expected_bytes: int) -> None:
        """Announce an upload; `expected_bytes` is 0 where the client does not say."""

    async def append(self, upload_id: str, offset: int, piece: bytes) -> None:
        """Write a piece of at most `PIECE_BYTES`. The same call again does no harm."""

    async def finish_upload(self, owner: str, file: NewFile) -> StoredFile:
        """Make a file of the upload with the file's id."""

    async def abort_upload(self, upload_id: str) -> None:
        """Forget an upload."""

    async def file(self, owner: str, file_id: str) -> StoredFile: ...

    async def list_files(
        self, owner: str, after: str | None, limit: int, order: Order, purpose: str | None
    ) -> Listing[StoredFile]: ...

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Raises ConflictError where a batch that has not ended reads it."""

    async def read(self, file_id: str, offset: int) -> bytes:
        """At most `PIECE_BYTES` of a file that `file` has found, empty at its end.

        A file that is deleted meanwhile stays readable while somebody reads it.
        """

    async def create_batch(self, owner: str, batch: NewBatch) -> Batch:
        """Raises RateLimitError where the key has as many as it may."""

    async def batch(self, owner: str, batch_id: str) -> Batch: ...

    async def list_batches(self, owner: str, after: str | None, limit: int) -> Listing[Batch]: ...

    async def cancel_batch(self, owner: str, batch_id: str) -> Batch:
        """Raises ConflictError where it has ended otherwise."""
