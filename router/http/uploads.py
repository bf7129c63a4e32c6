"""A request's body, read as it arrives: fields into memory, the audio into a spool file.

Every byte is counted while reading, so that a limit ends the upload when it is crossed; Starlette's
own form parser has no limit on a file's size. The spool file has a name, because audio workers open
it from their own processes; it is locked (flock) until it is deleted, when the context ends. One
that nobody has locked is that of a killed router, and is swept.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.common.errors import OverloadedError
from router.api.documents import AUDIO_FIELD, decoded
from router.audio.containers import wav_head
from router.audio.protocol import SPOOL_PREFIX, too_large
from router.http.bodies import (
    DATA,
    FILE_FIELD,
    FORM_TYPE,
    GROWTH,
    JSON_TYPE,
    MAX_FRAMING_BYTES,
    MAX_REFERENCES_BYTES,
    FormReader,
    form_boundary,
    media_type,
    read_document,
)

logger = logging.getLogger(__name__)

WRITE_BYTES = 1024 * 1024  # gathered before a thread writes them
RETRY_AFTER_S = 10.0  # after a full disk
SPOOLED = f"{SPOOL_PREFIX}*"
SWEEP_S = 5.0  # between two sweeps
NEW_S = 2.0  # a file this young may not be locked yet


@dataclass(frozen=True, slots=True)
class BodyShape:
    """What the bodies of an endpoint look like."""

    file_field: str = FILE_FIELD  # of the form
    takes_json: bool = True  # base64 in JSON will do too
    is_headerless: bool = False  # 16 kHz mono int16 samples, which get a header

    def is_json(self, headers: Mapping[str, str]) -> bool:
        return self.takes_json and media_type(headers) == JSON_TYPE

    def audio_field(self, headers: Mapping[str, str]) -> str:
        """What the client calls the audio of a request with these headers."""
        return AUDIO_FIELD if self.is_json(headers) else self.file_field


FORM_OR_JSON = BodyShape()


@dataclass(frozen=True, slots=True)
class UploadedForm:
    """What a client sent; size_bytes: as the file."""

    fields: tuple[tuple[str, str], ...]
    path: Path
    filename: str
    size_bytes: int


def check_content_length(headers: Mapping[str, str], max_upload_bytes: int) -> int | None:
    """The announced length, None in chunks. Raises PayloadTooLargeError: longer than any body whose
    file is within the limit.
    """
    announced = headers.get("content-length", "")
    if not (announced.isascii() and announced.isdigit()):
        return None
    length = int(announced)
    is_json = media_type(headers) == JSON_TYPE
    longest = GROWTH * max_upload_bytes if is_json else max_upload_bytes + MAX_REFERENCES_BYTES
    if length > longest + MAX_FRAMING_BYTES:
        raise too_large(max_upload_bytes, length)
    return length


@asynccontextmanager
async def receive_form(
    headers: Mapping[str, str],
    chunks: AsyncIterator[bytes],
    *,
    max_upload_bytes: int,
    spool_dir: Path | None = None,
    shape: BodyShape = FORM_OR_JSON,
) -> AsyncIterator[UploadedForm]:
    """Read a whole body; the file is at `path` until the context ends.

    Raises InvalidRequestError: of another type, malformed, over a limit on fields, or without a
    file; PayloadTooLargeError.
    """
    spool = _Spool(spool_dir, wav_head() if shape.is_headerless else b"")
    try:
        if shape.is_json(headers):
            filename = ""
            fields = await _receive_json(chunks, spool, max_upload_bytes)
        else:
            expected = f"{FORM_TYPE} or {JSON_TYPE.decode()}" if shape.takes_json else FORM_TYPE
            boundary = form_boundary(headers, expected)
            form = FormReader(boundary, spool, max_upload_bytes, shape.file_field)
            async for chunk in chunks:
                form.feed(chunk)
                await spool.flush(WRITE_BYTES)
            fields, filename = form.finish(), form.filename
        await spool.flush()
        yield UploadedForm(fields, spool.path, filename, spool.size_bytes)
    finally:
        spool.delete()


async def _receive_json(
    chunks: AsyncIterator[bytes], spool: _Spool, max_upload_bytes: int
) -> tuple[tuple[str, str], ...]:
    """Read a JSON body whole, its audio into the spool. Returns the other fields."""
    limit = round(GROWTH * max_upload_bytes) + MAX_FRAMING_BYTES
    content = bytearray()
    async for chunk in chunks:
        content += chunk
        if len(content) > limit:
            raise too_large(max_upload_bytes, len(content))
    fields, text = await asyncio.to_thread(read_document, bytes(content), max_upload_bytes)
    pieces = decoded(text, DATA)
    while piece := await asyncio.to_thread(next, pieces, b""):
        spool.append(piece)
        if spool.size_bytes > max_upload_bytes:
            raise too_large(max_upload_bytes, len(content))
        await spool.flush(WRITE_BYTES)
    return fields


async def sweep_spool_always(spool_dir: Path | None = None) -> None:
    while True:
        await asyncio.to_thread(sweep_spool, spool_dir)
        await asyncio.sleep(SWEEP_S)


def sweep_spool(spool_dir: Path | None = None) -> int:
    """Delete uploads and recordings of voices of killed routers, which nobody has locked. Returns
    how many.
    """
    usual = Path(tempfile.gettempdir())
    swept = 0
    for path in {path for one in (usual, spool_dir or usual) for path in one.glob(SPOOLED)}:
        with suppress(OSError):  # it is locked, it is gone already, or it is another user's
            if time.time() - path.stat().st_mtime < NEW_S:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                swept += 1
    if swept:
        logger.info("deleted %d spool files of routers that are gone", swept)
    return swept


class _Spool:
    """A temporary file with a name, written in large pieces by a thread. `head` does not count."""

    def __init__(self, folder: Path | None, head: bytes = b"") -> None:
        handle, name = tempfile.mkstemp(prefix=SPOOL_PREFIX, dir=folder)
        fcntl.flock(handle, fcntl.LOCK_EX)  # until it is closed, by us or by our end
        self.path = Path(name)
        self.size_bytes = 0
        self._file = os.fdopen(handle, "wb", buffering=0)
        self._pieces: list[bytes] = [head] if head else []
        self.buffered = len(head)

    def append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.buffered += len(piece)
        self.size_bytes += len(piece)

    async def flush(self, at_least: int = 1) -> None:
        """Write what is there, if it is so many bytes."""
        if self.buffered < at_least:
            return
        pieces, self._pieces, self.buffered = self._pieces, [], 0
        if pieces:
            # Shielded: the descriptor must not be closed under a thread that writes to it.
            writing = asyncio.ensure_future(asyncio.to_thread(self._write, b"".join(pieces)))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                with suppress(OSError):
                    await writing
                raise
            except OSError as error:
                logger.exception("the upload cannot be stored in %s", self.path.parent)
                raise OverloadedError(
                    "The server has no room for the upload now. Please try again shortly.",
                    retry_after_s=RETRY_AFTER_S,
                ) from error

    def delete(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]
