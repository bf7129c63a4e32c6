"""What programs ask of a router, all without a key. `/livez` answers as long as the process does,
also while models load; `/readyz` is for balancers; `/health` tells people more.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse

from cluster.common.settings import RouterSettings
from router.http.admission import Admission
from router.http.models import ModelRegistry
from router.http.realtime.service import RealtimeService


def add_probes(
    app: FastAPI,
    registry: ModelRegistry,
    admission: Admission,
    realtime: RealtimeService,
    settings: RouterSettings,
) -> None:
    probes = APIRouter(tags=["operations"])

    @probes.get("/livez", summary="Whether the router runs", response_class=PlainTextResponse)
    async def livez() -> str:
        return "ok"

    @probes.get(
        "/readyz",
        summary="Whether the router may be sent requests",
        response_class=PlainTextResponse,
        responses={503: {"description": "Not yet, or no more: it stops."}},
    )
    async def readyz() -> PlainTextResponse:
        """200 once all pools are ready, 503 before, and when the router stops."""
        if realtime.is_draining:
            return PlainTextResponse("stopping", 503)
        status = (await registry.health())["status"]
        return PlainTextResponse(status, 200 if status == "ready" else 503)

    @probes.get("/version", summary="The version of splitscribe")
    async def tell_version() -> dict[str, str]:
        return {"version": version("splitscribe")}

    @probes.get(
        "/health",
        summary="The state of the router, the models and their workers",
        response_model=None,
        responses={503: {"description": "Not ready; the body has the same shape."}},
    )
    async def health() -> JSONResponse:
        """200 once all pools are ready, 503 before; every model and worker either way."""
        body = await registry.health()
        body["router"] = {
            "requests": admission.requests,
            "pending_audio_s": round(admission.pending_audio_s, 1),
            "realtime_sessions": realtime.sessions,
            "max_upload_bytes": settings.max_upload_bytes,
        }
        return JSONResponse(body, 200 if body["status"] == "ready" else 503)

    app.include_router(probes)
