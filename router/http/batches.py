"""`/v1/batches`: many requests in one file, answered within a day.

The routes check what is asked for and show what there is; `router.batches` does the work. Where no
folder is set, they say which setting turns them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request

from cluster.common.errors import InvalidRequestError, NotFoundError
from router.api.batch_bodies import Batch, BatchPage, CreateBatchRequest
from router.api.documents import parse_document
from router.api.openapi import whole_schema
from router.batches.service import BatchService
from router.batches.store import new_id
from router.http.files import add_files, key_owner
from router.http.keys import KeyRing
from router.http.uploads import small_body

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
