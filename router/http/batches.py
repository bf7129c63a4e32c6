"""`/v1/batches`: many requests in one file, answered within a day.

The routes check what is asked for and show what there is; `router.batches` does the work. Where no
folder is set, they say which setting turns them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request

from cluster.errors import InvalidRequestError, NotFoundError
from router.api.batch_bodies import (
    BatchErrorListResponse,
    BatchErrorResponse,
    BatchListResponse,
    BatchResponse,
    CreateBatchRequest,
    RequestCountsResponse,
    expiry_s,
)
from router.api.documents import parse_document
from router.api.openapi import whole_schema
from router.batches.interface import Batch, BatchBackend, NewBatch, new_id
from router.http.files import add_files, key_owner
from router.http.keys import KeyRing
from router.http.uploads import small_body

MAX_BODY_BYTES = 256 * 1024
INPUT_PURPOSE = "batch"


@dataclass(frozen=True, slots=True)
class BatchAccess:
    """How a router reaches files and batches. max_file_bytes: of an upload."""

    backend: BatchBackend
    max_file_bytes: int


def add_batches(api: APIRouter, access: BatchAccess | None, keys: KeyRing) -> None:
    """Add `/v1/files` and `/v1/batches`; without `access`, what says how to turn them on."""
    if access is None:
        _add_refusal(api)
        return
    add_files(api, access.backend, keys, access.max_file_bytes)
    _add_routes(api, access.backend, keys)


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


def _add_routes(api: APIRouter, backend: BatchBackend, keys: KeyRing) -> None:
    schema = {"application/json": {"schema": whole_schema(CreateBatchRequest)}}

    @api.post(
        "/batches",
        tags=["batches"],
        summary="Create a batch",
        openapi_extra={"requestBody": {"required": True, "content": schema}},
    )
    async def create_batch(request: Request) -> BatchResponse:
        """Run the lines of a file: `{custom_id, method, url, body}`.

        `body` has the endpoint's fields, and the audio as `file_id`, `file_url` or `url` (an http
        or `data:` URL), or `input_audio`.
        """
        owner = key_owner(request, keys)
        content = await small_body(request.receive, MAX_BODY_BYTES)
        asked = parse_document(CreateBatchRequest, content)
        file = await backend.file(owner, asked.input_file_id)
        if file.purpose != INPUT_PURPOSE:
            raise InvalidRequestError(
                f"The input file has the purpose {file.purpose!r}; upload it with "
                f"purpose={INPUT_PURPOSE!r}.",
                param="input_file_id",
                code="invalid_purpose",
            )
        new = NewBatch(
            new_id("batch_"),
            asked.input_file_id,
            asked.endpoint,
            asked.metadata,
            expiry_s(asked.output_expires_after),
            asked.webhook_url,
        )
        return shown(await backend.create_batch(owner, new))

    @api.get("/batches", tags=["batches"], summary="List batches")
    async def list_batches(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> BatchListResponse:
        """Batches of the key that asks, the newest first."""
        found = await backend.list_batches(key_owner(request, keys), after, limit)
        return BatchListResponse.of([shown(batch) for batch in found.items], found.has_more)

    @api.get("/batches/{batch_id}", tags=["batches"], summary="Look a batch up")
    async def retrieve_batch(request: Request, batch_id: str) -> BatchResponse:
        return shown(await backend.batch(key_owner(request, keys), batch_id))

    @api.post("/batches/{batch_id}/cancel", tags=["batches"], summary="Cancel a batch")
    async def cancel_batch(request: Request, batch_id: str) -> BatchResponse:
        """What was transcribed until then is in its output file."""
        return shown(await backend.cancel_batch(key_owner(request, keys), batch_id))


def shown(batch: Batch) -> BatchResponse:
    errors = [
        BatchErrorResponse(code=one.code, message=one.message, param=one.param, line=one.line)
        for one in batch.errors
    ]
    return BatchResponse(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors=BatchErrorListResponse(data=errors) if errors else None,
        input_file_id=batch.input_file_id,
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=batch.created_at,
        expires_at=batch.expires_at,
        request_counts=RequestCountsResponse(
            total=batch.total, completed=batch.completed, failed=batch.failed
        ),
        metadata=None if batch.metadata is None else dict(batch.metadata),
        paused=batch.paused,
        **{name: at for name, at in batch.times.items() if name in BatchResponse.model_fields},
    )
