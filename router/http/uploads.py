"""Read a request's body as it arrives: fields into memory, the audio into a temporary file.

Starlette's form parser does not limit a file's size. The file has no name, so that it cannot
outlive the router; audio workers open it through this process's descriptor.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.common.errors import OverloadedError
from router.api.documents import AUDIO_FIELD, decoded
from router.audio.containers import wav_head
from router.audio.protocol import path_of, too_large
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

WRITE_BYTES = 1024 * 1024  # buffered until a thread writes them
RETRY_AFTER_S = 10.0  # after a full disk


@dataclass(frozen=True, slots=True)
class BodyShape:
    file_field: str = FILE_FIELD  # of the form
    takes_json: bool = True  # with the audio in base64, besides a form
    is_headerless: bool = False  # 16 kHz mono int16 samples, to which a WAV header is added

    def is_json(self, headers: Mapping[str, str]) -> bool:
        return self.takes_json and media_type(headers) == JSON_TYPE

    def audio_field(self, headers: Mapping[str, str]) -> str:
        """The client's name for the audio in a body with these headers."""
        return AUDIO_FIELD if self.is_json(headers) else self.file_field


FORM_OR_JSON = BodyShape()


@dataclass(frozen=True, slots=True)
class UploadedForm:
    fields: tuple[tuple[str, str], ...]
    path: Path
    filename: str
    size_bytes: int  # of the file


def check_content_length(headers: Mapping[str, str], max_upload_bytes: int) -> int | None:
    """The announced length; None without one. Raises PayloadTooLargeError if the file's size is
    certain to exceed the limit.
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
    shape: BodyShape = FORM_OR_JSON,
) -> AsyncIterator[UploadedForm]:
    """Read a whole body. The file exists until the context ends.

    Raises InvalidRequestError, PayloadTooLargeError, or OverloadedError if the disk is full.
    """
    spool = _Spool(wav_head() if shape.is_headerless else b"")
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
        spool.close()


async def _receive_json(
    chunks: AsyncIterator[bytes], spool: _Spool, max_upload_bytes: int
) -> tuple[tuple[str, str], ...]:
    """Decode the audio of a JSON body into the spool. Returns the other fields."""
    limit = round(GROWTH * max_upload_bytes) + MAX_FRAMING_BYTES
    content = bytearray()
    async for chunk in chunks:
        content += chunk
        if len(content) > limit:
            raise too_large(max_upload_bytes, len(content))
    fields, text = await asyncio.to_thread(read_document, bytes(content))
    pieces = decoded(text, DATA)
    while piece := await asyncio.to_thread(next, pieces, b""):
        spool.append(piece)
        if spool.size_bytes > max_upload_bytes:
            raise too_large(max_upload_bytes, len(content))
        await spool.flush(WRITE_BYTES)
    return fields


class _Spool:
    """A temporary file that a thread writes in large pieces. `size_bytes` is without `head`."""

    def __init__(self, head: bytes = b"") -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see `close`
        self.path = path_of(self._file.fileno())
        self.size_bytes = 0
        self._pieces: list[bytes] = [head] if head else []
        self.buffered = len(head)

    def append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.buffered += len(piece)
        self.size_bytes += len(piece)

    async def flush(self, at_least: int = 1) -> None:
        if self.buffered < at_least:
            return
        pieces, self._pieces, self.buffered = self._pieces, [], 0
        # Shielded: the descriptor must not be closed while a thread writes to it.
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, b"".join(pieces)))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            with suppress(OSError):
                await writing
            raise
        except OSError as error:
            logger.exception("the upload cannot be stored in %s", self.path.readlink().parent)
            raise OverloadedError(
                "The server has no room for the upload now. Please try again shortly.",
                retry_after_s=RETRY_AFTER_S,
            ) from error

    def close(self) -> None:
        self._file.close()

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]
