"""The HTTP surface: OpenAI's transcription endpoint, models, health, documentation.

`create_app` wires the parts together: `uploads` reads the form, `schemas` checks it,
`admission` lets it in, the pipeline does the work, `formats` writes the answer. Errors are
raised here and written by `envelope`. Knows the pipeline by its protocol only.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from cluster.errors import AuthenticationError
from cluster.logs import current_request_id
from cluster.settings import RouterSettings
from router.admission import BYTES_PER_AUDIO_S, Admission
from router.envelope import install_error_handlers
from router.formats import render
from router.middleware import RequestMiddleware
from router.models import ServedModel
from router.openapi import DESCRIPTION, ERRORS, TRANSCRIPTION_BODY, TRANSCRIPTION_OK
from router.schemas import (
    ModelListResponse,
    ModelResponse,
    TranscriptionResponse,
    VerboseTranscriptionResponse,
    parse_transcription,
)
from router.seams import HealthReport, Pipeline, RequestContext, StageTimings
from router.supervise import supervise
from router.uploads import ClientDisconnectedError, check_content_length, receive_form, sweep_spool

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0
CLIENT_CLOSED = 499  # never seen by anyone but the access log
LEFTOVER_AGE_S = 3600.0  # beyond the longest request; then a spool file has no owner


def create_app(
    pipeline: Pipeline,
    settings: RouterSettings,
    model: ServedModel,
    *,
    echo_request_id: bool = True,
    spool_dir: Path | None = None,
) -> FastAPI:
    """Build the application.

    Args:
        pipeline: does the work.
        settings: limits, deadlines and the API key.
        model: what clients may ask for.
        echo_request_id: False behind Ray Serve's proxy, which adds `x-request-id` to every
            answer itself (twice would join to one wrong id).
        spool_dir: where uploads wait; default: the system's folder for temporary files.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        age_s = settings.max_deadline_s + LEFTOVER_AGE_S
        await asyncio.to_thread(sweep_spool, age_s, spool_dir)
        yield

    app = FastAPI(
        title="splitscribe",
        version=_version(),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.add_middleware(RequestMiddleware, echo_request_id=echo_request_id)
    install_error_handlers(app)
    admission = Admission(settings.max_pending_audio_s)
    guards = [Depends(_key_check(settings.api_key))] if settings.api_key else []
    api = APIRouter(prefix="/v1", dependencies=guards, responses=ERRORS)
    _add_transcriptions(api, pipeline, settings, model, admission, spool_dir)
    _add_models(api, model)
    app.include_router(api)
    _add_health(app, pipeline, admission)
    return app


def _add_transcriptions(
    api: APIRouter,
    pipeline: Pipeline,
    settings: RouterSettings,
    model: ServedModel,
    admission: Admission,
    spool_dir: Path | None,
) -> None:
    @api.post(
        "/audio/transcriptions",
        tags=["audio"],
        summary="Transcribe audio",
        response_model=TranscriptionResponse | VerboseTranscriptionResponse,
        responses={200: TRANSCRIPTION_OK},
        openapi_extra=TRANSCRIPTION_BODY,
    )
    async def create_transcription(request: Request) -> Response:
        """Audio in, text out. Fields may come in any order."""
        started_s = time.monotonic()
        length = check_content_length(request.headers, settings.max_upload_bytes)
        try:
            with admission.admit(length or 0) as share:
                async with receive_form(
                    request.headers,
                    request.receive,
                    max_upload_bytes=settings.max_upload_bytes,
                    spool_dir=spool_dir,
                ) as form:
                    uploaded_s = time.monotonic()
                    params = parse_transcription(form.fields, model.languages)
                    model.describe(params.model)
                    share.expect(form.size_bytes / BYTES_PER_AUDIO_S)
                    context = RequestContext(
                        request_id=current_request_id(),
                        ledger=share,
                        min_deadline_s=settings.min_deadline_s,
                        deadline_factor=settings.deadline_factor,
                        max_deadline_s=settings.max_deadline_s,
                    )
                    work = pipeline.transcribe(form.path, params, context)
                    result = await supervise(work, request.receive, context)
        except ClientDisconnectedError:
            logger.info("the client hung up after %.1f s", time.monotonic() - started_s)
            return Response(status_code=CLIENT_CLOSED)
        total_s = time.monotonic() - started_s
        logger.info(
            "transcribed %.2f s of audio in %.3f s (%d windows)",
            result.transcript.duration_s,
            total_s,
            result.timings.windows,
        )
        rendered = render(result.transcript, params.response_format)
        timing = server_timing(result.timings, upload_s=uploaded_s - started_s, total_s=total_s)
        return Response(
            rendered.body, media_type=rendered.media_type, headers={"server-timing": timing}
        )


def _add_models(api: APIRouter, model: ServedModel) -> None:
    @api.get("/models", tags=["models"], summary="List the models")
    async def list_models() -> ModelListResponse:
        """Every name that `model` may have, apart from the alias `whisper-1`."""
        return model.listing()

    @api.get("/models/{model_id:path}", tags=["models"], summary="Look one model up")
    async def retrieve_model(model_id: str) -> ModelResponse:
        """Names with a slash may be sent plain or as `%2F`."""
        return model.describe(model_id)


def _add_health(app: FastAPI, pipeline: Pipeline, admission: Admission) -> None:
    @app.get(
        "/health",
        tags=["operations"],
        summary="Whether requests can be served",
        response_model=None,
        responses={503: {"description": "Not ready; the body has the same shape."}},
    )
    async def health() -> JSONResponse:
        """200 once both pools are ready, 503 before; each pool's workers either way."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                report = await pipeline.health()
        except Exception:  # the answer to "are you well?" must not be a crash
            logger.exception("the pools cannot be asked for their health")
            report = HealthReport(ready=False)
        body = {
            "status": "ready" if report.ready else "not ready",
            "pools": {role: asdict(pool) for role, pool in report.pools.items()},
            "router": {
                "requests": admission.requests,
                "pending_audio_s": round(admission.pending_audio_s, 1),
            },
        }
        return JSONResponse(body, 200 if report.ready else 503)


def server_timing(timings: StageTimings, *, upload_s: float, total_s: float) -> str:
    """The `server-timing` header: each stage's milliseconds, summed over parallel windows."""
    stages: list[tuple[str, float, str]] = [
        ("upload", upload_s, ""),
        ("audio", timings.audio_s, ""),
        ("queue", timings.queue_s, ""),
        ("encode", timings.encode_s, f"{timings.windows} windows"),
        ("transfer", timings.transfer_s, f"{timings.transfer_bytes} bytes"),
        ("decode", timings.decode_s, f"{timings.steps} steps"),
        ("total", total_s, ""),
    ]
    return ", ".join(
        f"{name};dur={1000 * seconds:.1f}" + (f';desc="{note}"' if note else "")
        for name, seconds, note in stages
    )


def _key_check(api_key: str) -> Callable[..., Awaitable[None]]:
    """A dependency that lets only bearers of `api_key` pass."""
    expected = api_key.encode()
    bearer = HTTPBearer(auto_error=False, description="the server's API key")

    async def check(
        credentials: HTTPAuthorizationCredentials | None = Depends(bearer),  # noqa: B008
    ) -> None:
        if credentials is None:
            raise AuthenticationError("no API key came; send 'Authorization: Bearer <key>'")
        if not hmac.compare_digest(credentials.credentials.encode("latin-1"), expected):
            raise AuthenticationError("the API key is not right")

    return check


def _version() -> str:
    try:
        return version("splitscribe")
    except PackageNotFoundError:  # run from a source tree
        return "0"
