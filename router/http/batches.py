"""`/v1/files` and `/v1/batches`: many requests in one file, answered within a day.

Bytes of files stream both ways, a piece at a time, to and from the process that owns them. Each key
sees its own only. The routes check what is asked for and show what there is; `router.batches` does
the work. Where no folder is set, they say which setting turns them on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal
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
from router.batches.service import PIECE_BYTES, BatchService
from router.batches.store import new_id
from router.http.bodies import FILE_FIELD, FormReader, form_boundary
from router.http.keys import KeyRing
from router.http.uploads import (
    BodyShape,
    ClientDisconnectedError,
    body_chunks,
    check_content_length,
    small_body,
)

MAX_BODY_BYTES = 256 * 1024
INPUT_PURPOSE = "batch"


@dataclass(frozen=True, slots=True)
class BatchAccess:
    """How a router reaches files and batches. max_file_bytes: of an upload."""

    batches: BatchService
    max_file_bytes: int


def add_batches(api: APIRouter, access: BatchAccess | None, keys: KeyRing) -> None:
    """Add `/v1/files` and `/v1/batches`; without `access`, what says how to turn them on."""
    if access is None:
        _add_refusal(api)
        return
    add_files(api, access.batches, keys, access.max_file_bytes)
    _add_routes(api, access.batches, keys)


def _add_refusal(api: APIRouter) -> None:
    async def refuse() -> None:
        raise NotFoundError(
            "Files and batches are turned off here; the server's setting batches.folder names the "
            "folder that they are kept in, and turns them on.",
            code="batches_not_enabled",
        )

    for path in ("/files", "/batches"):
        for route in (path, path + "/{rest:path}"):
            api.add_api_route(
                route, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False
            )


def _add_routes(api: APIRouter, batches: BatchService, keys: KeyRing) -> None:
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
        owner = key_owner(request, keys)
        content = await small_body(request.receive, MAX_BODY_BYTES)
        asked = parse_document(CreateBatchRequest, content)
        file = await batches.file(owner, asked.input_file_id)
        if file.purpose != INPUT_PURPOSE:
            raise InvalidRequestError(
                f"The input file has the purpose {file.purpose!r}; upload it with "
                f"purpose={INPUT_PURPOSE!r}.",
                param="input_file_id",
                code="invalid_purpose",
            )
        return await batches.create_batch(owner, new_id("batch_"), asked)

    @api.get("/batches", tags=["batches"], summary="List batches")
    async def list_batches(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> BatchPage:
        """Batches of the key that asks, the newest first."""
        return await batches.list_batches(key_owner(request, keys), after, limit)

    @api.get("/batches/{batch_id}", tags=["batches"], summary="Look a batch up")
    async def retrieve_batch(request: Request, batch_id: str) -> Batch:
        return await batches.batch(key_owner(request, keys), batch_id)

    @api.post("/batches/{batch_id}/cancel", tags=["batches"], summary="Cancel a batch")
    async def cancel_batch(request: Request, batch_id: str) -> Batch:
        """What was transcribed until then is in its output file."""
        return await batches.cancel_batch(key_owner(request, keys), batch_id)


logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
MAX_NAME = 255  # characters of a file's name
FORM_ONLY = BodyShape(takes_json=False)


def _upload_body() -> dict[str, Any]:
    fields = whole_schema(UploadFields)
    properties = {"file": {"type": "string", "format": "binary"}, **fields["properties"]}
    form = {**fields, "properties": properties, "required": ["file", "purpose"]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


def key_owner(request: Request, keys: KeyRing) -> str:
    """Whose objects a request may see: a digest of its key; empty where there are no keys."""
    return keys.owner_digest(getattr(request.state, "key_owner", None)).hex()


class FileRoutes:
    """What the routes do."""

    def __init__(self, batches: BatchService, keys: KeyRing, max_file_bytes: int) -> None:
        self._batches = batches
        self._keys = keys
        self._max_file_bytes = max_file_bytes

    async def create(self, request: Request) -> Response | FileObject:
        with self._keys.request_of(getattr(request.state, "key_owner", None)):
            try:
                return await self._receive(request)
            except ClientDisconnectedError:
                logger.info("the client hung up in the middle of an upload")
                return Response(status_code=CLIENT_CLOSED)

    async def _receive(self, request: Request) -> FileObject:
        owner, file_id = key_owner(request, self._keys), new_id("file-")
        length = check_content_length(request.headers, self._max_file_bytes)
        sink = _Upload(self._batches, file_id)
        form = FormReader(form_boundary(request.headers), sink, self._max_file_bytes)
        await self._batches.begin_upload(owner, file_id, length or 0)
        try:
            async for chunk in body_chunks(request.receive):
                form.feed(chunk)
                await sink.flush(PIECE_BYTES)
            try:
                pairs = form.finish()
            except AudioTooShortError as error:
                raise InvalidRequestError(
                    error.message, param=FILE_FIELD, code="empty_file"
                ) from None
            fields = parse_upload(pairs)
            await sink.flush()
            name = form.filename.replace("\\", "/").rpartition("/")[2][:MAX_NAME]
            return await self._batches.finish_upload(owner, file_id, name, sink.size_bytes, fields)
        except BaseException:
            with suppress(SplitscribeError):
                await asyncio.shield(self._batches.abort_upload(file_id))
            raise

    async def content(self, request: Request, file_id: str) -> Response:
        file = await self._batches.file(key_owner(request, self._keys), file_id)
        first = await self._batches.read(file.id, 0)
        return StreamingResponse(
            self._pieces(file, first),
            media_type="application/octet-stream",
            headers={
                "content-length": str(file.bytes),
                "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename)}",
                "x-content-type-options": "nosniff",
            },
        )

    async def _pieces(self, file: FileObject, piece: bytes) -> AsyncIterator[bytes]:
        offset = 0
        while piece:
            yield piece
            offset += len(piece)
            if offset >= file.bytes:
                return
            piece = await self._batches.read(file.id, offset)


class _Upload:
    """Where a form's file goes; implements `router.http.bodies.FileSink`."""

    def __init__(self, batches: BatchService, upload_id: str) -> None:
        self._batches = batches
        self._upload_id = upload_id
        self._buffer = bytearray()
        self._sent_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._sent_bytes + len(self._buffer)

    def append(self, piece: bytes) -> None:
        self._buffer += piece

    async def flush(self, at_least: int = 1) -> None:
        """Send what is there, in pieces, while it is `at_least` so much."""
        while len(self._buffer) >= at_least:
            piece = bytes(self._buffer[:PIECE_BYTES])
            await self._batches.append(self._upload_id, self._sent_bytes, piece)
            del self._buffer[: len(piece)]
            self._sent_bytes += len(piece)


def add_files(api: APIRouter, batches: BatchService, keys: KeyRing, max_file_bytes: int) -> None:
    """Add the routes to `api`."""
    routes = FileRoutes(batches, keys, max_file_bytes)

    @api.post(
        "/files",
        tags=["files"],
        summary="Upload a file",
        response_model=FileObject,
        openapi_extra=_upload_body(),
    )
    async def create_file(request: Request) -> Response | FileObject:
        """The lines of a batch (`purpose` is `batch`), or audio that they name."""
        return await routes.create(request)

    @api.get("/files", tags=["files"], summary="List files")
    async def list_files(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> FilePage:
        """Files of the key that asks, the newest first."""
        return await batches.list_files(key_owner(request, keys), after, limit, order, purpose)

    @api.get("/files/{file_id}", tags=["files"], summary="Look a file up")
    async def retrieve_file(request: Request, file_id: str) -> FileObject:
        return await batches.file(key_owner(request, keys), file_id)

    @api.delete("/files/{file_id}", tags=["files"], summary="Delete a file")
    async def delete_file(request: Request, file_id: str) -> FileDeleted:
        """Not while it is the input of a batch that has not ended."""
        await batches.delete_file(key_owner(request, keys), file_id)
        return FileDeleted(id=file_id)

    @api.get(
        "/files/{file_id}/content",
        tags=["files"],
        summary="Download a file",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def retrieve_content(request: Request, file_id: str) -> Response:
        return await routes.content(request, file_id)
