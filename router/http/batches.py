"""The routes of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from cluster.common.errors import (
    AudioTooShortError,
    InvalidRequestError,
    NotFoundError,
    SplitscribeError,
)
from router.api.batch_bodies import (
    Batch,
    BatchPage,
    CreateBatchRequest,
    FileDeleted,
    FileObject,
    FilePage,
    UploadFields,
    parse_upload,
)
from router.api.documents import parse_document
from router.api.openapi import whole_schema
from router.batches.database import new_id
from router.batches.service import PIECE_BYTES, BatchService
from router.http.bodies import FILE_FIELD, FormReader, form_boundary
from router.http.envelope import notes_of
from router.http.keys import KeyRing
from router.http.uploads import check_content_length
from router.http.usage import UsageAccount

MAX_NAME = 255  # characters of a file's name
INPUT_PURPOSE = "batch"


@dataclass(frozen=True, slots=True)
class BatchAccess:
    batches: BatchService
    max_file_bytes: int


def add_batches(
    api: APIRouter, access: BatchAccess | None, keys: KeyRing, usage: UsageAccount
) -> None:
    """Add the routes. Without `access`, they answer how to turn batches on."""
    if access is not None:
        _add_files(api, access, keys)
        _add_batches(api, access.batches, keys, usage)
        return

    async def refuse() -> None:
        raise NotFoundError(
            "Files and batches are turned off. The server's setting batches.folder, which names "
            "a folder for them, turns them on.",
            code="batches_not_enabled",
        )

    methods = ["GET", "POST", "DELETE"]
    for path in ("/files", "/files/{rest:path}", "/batches", "/batches/{rest:path}"):
        api.add_api_route(path, refuse, methods=methods, include_in_schema=False)


def _key_owner(request: Request, keys: KeyRing) -> str:
    """A digest of the key; empty without keys."""
    return keys.owner_digest(notes_of(request.scope).owner).hex()


def _add_batches(api: APIRouter, batches: BatchService, keys: KeyRing, usage: UsageAccount) -> None:
    schema = {"application/json": {"schema": whole_schema(CreateBatchRequest)}}

    @api.post(
        "/batches",
        tags=["batches"],
        summary="Create a batch",
        openapi_extra={"requestBody": {"required": True, "content": schema}},
    )
    async def create_batch(request: Request) -> Batch:
        """Run the lines of a file: `{custom_id, method, url, body}`.

        `body` has the endpoint's fields, and the audio as `file_id`, `file_url` or `url` (an http
        or `data:` URL), or `input_audio`.
        """
        owner = _key_owner(request, keys)
        asked = parse_document(CreateBatchRequest, await request.body())
        file = await batches.file(owner, asked.input_file_id)
        if file.purpose != INPUT_PURPOSE:
            raise InvalidRequestError(
                f"The input file has the purpose {file.purpose!r}; upload it with "
                f"purpose={INPUT_PURPOSE!r}.",
                param="input_file_id",
                code="invalid_purpose",
            )
        if (key := notes_of(request.scope).owner) is not None:
            usage.note_batches(key, await batches.usage(owner))
            usage.begin(key)
        return await batches.create_batch(owner, new_id("batch_"), asked)

    @api.get("/batches", tags=["batches"], summary="List batches")
    async def list_batches(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> BatchPage:
        """The batches of the key, newest first."""
        return await batches.list_batches(_key_owner(request, keys), after, limit)

    @api.get("/batches/{batch_id}", tags=["batches"], summary="Look a batch up")
    async def retrieve_batch(request: Request, batch_id: str) -> Batch:
        return await batches.batch(_key_owner(request, keys), batch_id)

    @api.post("/batches/{batch_id}/cancel", tags=["batches"], summary="Cancel a batch")
    async def cancel_batch(request: Request, batch_id: str) -> Batch:
        """The output file has what was transcribed until then."""
        return await batches.cancel_batch(_key_owner(request, keys), batch_id)


def _add_files(api: APIRouter, access: BatchAccess, keys: KeyRing) -> None:
    batches = access.batches
    fields = whole_schema(UploadFields)
    properties = {"file": {"type": "string", "format": "binary"}, **fields["properties"]}
    form = {**fields, "properties": properties, "required": ["file", "purpose"]}
    content = {"multipart/form-data": {"schema": form}}

    @api.post(
        "/files",
        tags=["files"],
        summary="Upload a file",
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    async def create_file(request: Request) -> FileObject:
        """Upload the lines of a batch (`purpose` is `batch`), or audio that they name."""
        with keys.request_of(notes_of(request.scope).owner):
            return await _receive(request, access, _key_owner(request, keys))

    @api.get("/files", tags=["files"], summary="List files")
    async def list_files(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> FilePage:
        """The files of the key, by default newest first."""
        return await batches.list_files(_key_owner(request, keys), after, limit, order, purpose)

    @api.get("/files/{file_id}", tags=["files"], summary="Look a file up")
    async def retrieve_file(request: Request, file_id: str) -> FileObject:
        return await batches.file(_key_owner(request, keys), file_id)

    @api.delete("/files/{file_id}", tags=["files"], summary="Delete a file")
    async def delete_file(request: Request, file_id: str) -> FileDeleted:
        """Refused while the file is the input of a batch that has not ended."""
        await batches.delete_file(_key_owner(request, keys), file_id)
        return FileDeleted(id=file_id)

    @api.get(
        "/files/{file_id}/content",
        tags=["files"],
        summary="Download a file",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def retrieve_content(request: Request, file_id: str) -> Response:
        file = await batches.file(_key_owner(request, keys), file_id)
        first = await batches.read(file.id, 0)

        async def pieces() -> AsyncIterator[bytes]:
            piece, offset = first, 0
            while piece:
                yield piece
                offset += len(piece)
                piece = await batches.read(file.id, offset) if offset < file.bytes else b""

        return StreamingResponse(
            pieces(),
            media_type="application/octet-stream",
            headers={
                "content-length": str(file.bytes),
                "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename)}",
                "x-content-type-options": "nosniff",
            },
        )


async def _receive(request: Request, access: BatchAccess, owner: str) -> FileObject:
    batches, most = access.batches, access.max_file_bytes
    file_id = new_id("file-")
    length = check_content_length(request.headers, most)
    sink = _Upload(batches, owner, file_id)
    form = FormReader(form_boundary(request.headers), sink, most)
    await batches.begin_upload(owner, file_id, length or 0)
    try:
        async for chunk in request.stream():
            form.feed(chunk)
            await sink.flush(PIECE_BYTES)
        try:
            pairs = form.finish()
        except AudioTooShortError as error:
            raise InvalidRequestError(error.message, param=FILE_FIELD, code="empty_file") from None
        fields = parse_upload(pairs)
        await sink.flush()
        name = form.filename.replace("\\", "/").rpartition("/")[2][:MAX_NAME]
        return await batches.finish_upload(owner, file_id, name, sink.size_bytes, fields)
    except BaseException:
        with suppress(SplitscribeError):
            await asyncio.shield(batches.abort_upload(file_id))
        raise


class _Upload:
    def __init__(self, batches: BatchService, owner: str, upload_id: str) -> None:
        self._batches = batches
        self._owner = owner
        self._upload_id = upload_id
        self._buffer = bytearray()
        self._sent_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._sent_bytes + len(self._buffer)

    def append(self, piece: bytes) -> None:
        self._buffer += piece

    async def flush(self, at_least: int = 1) -> None:
        while len(self._buffer) >= at_least:
            piece = bytes(self._buffer[:PIECE_BYTES])
            await self._batches.append(self._owner, self._upload_id, self._sent_bytes, piece)
            del self._buffer[: len(piece)]
            self._sent_bytes += len(piece)
