"""Build the HTTP application, and define OpenAI's endpoints for audio and models."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.metrics import ROUTER_METRICS, Recorder, report_each_second, silent_recorder
from cluster.common.settings import RouterSettings
from cluster.common.tracing import NO_TRACER, Tracer
from router.api.forms import parse_alignment, parse_transcription, parse_translation
from router.api.openapi import (
    ALIGNMENT_BODY,
    ALIGNMENT_OK,
    DESCRIPTION,
    ERRORS,
    TRANSCRIPTION_BODY,
    TRANSCRIPTION_OK,
    TRANSLATION_BODY,
    TRANSLATION_OK,
)
from router.api.responses import (
    AlignmentResponse,
    DiarizedTranscriptionResponse,
    ModelListResponse,
    ModelResponse,
    TranscriptionResponse,
    TranslationResponse,
    VerboseTranscriptionResponse,
    VerboseTranslationResponse,
)
from router.http.access import Access
from router.http.asr import add_asr_routes
from router.http.batches import BatchAccess, add_batches
from router.http.bodies import GROWTH, MAX_FRAMING_BYTES, MAX_REFERENCES_BYTES
from router.http.envelope import ASR_PATHS, install_error_handlers
from router.http.keys import BEARER, KeyFile
from router.http.middleware import RequestMiddleware
from router.http.models import ModelRegistry
from router.http.operations import add_metrics, add_probes
from router.http.page import add_docs, add_page
from router.http.realtime.access import ClientSecrets
from router.http.realtime.service import RealtimeService, add_realtime
from router.http.service import Endpoint, TranscriptionService
from router.http.shared import Shared
from router.http.usage import UsageAccount, add_usage

EXPOSED_HEADERS = (
    "x-request-id",
    "server-timing",
    "openai-processing-ms",
    "retry-after",
    "x-splitscribe-cache",
)


def create_app(
    registry: ModelRegistry,
    settings: RouterSettings,
    *,
    recorder: Recorder | None = None,
    tracer: Tracer = NO_TRACER,
    clock: Clock = SYSTEM_CLOCK,
    echo_request_id: bool = True,
    cluster_key: str | None = None,
    batches: BatchAccess | None = None,
) -> FastAPI:
    """Build the application. Drain the sessions of its `state.realtime` before it ends.

    echo_request_id: False behind Ray Serve's proxy, which adds `x-request-id` itself. The
        proxy also queues what WebSockets send, so too fast or slow clients are disconnected.
    cluster_key: signs client secrets; routers with the same key accept each other's.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        def report() -> None:
            service.report()
            realtime.report()

        chores = (report_each_second(report), key_file.follow())
        tasks = [asyncio.create_task(chore) for chore in chores]
        yield
        for task in tasks:
            task.cancel()

    key_file = KeyFile(settings)
    keys = key_file.ring
    app = FastAPI(
        title="splitscribe",
        version=version("splitscribe"),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # ours is at /docs; FastAPI's pages load their scripts from another host
        redoc_url=None,
    )
    recorder = recorder or silent_recorder(ROUTER_METRICS)
    usage = UsageAccount(keys, settings, recorder)
    shared = Shared(registry, settings, keys, usage, recorder, clock)
    longest = round(GROWTH * settings.max_upload_bytes) + MAX_FRAMING_BYTES + MAX_REFERENCES_BYTES
    uploads = dict.fromkeys(("/v1/audio/", *ASR_PATHS), longest)
    if batches is not None:
        uploads["/v1/files"] = batches.max_file_bytes + MAX_FRAMING_BYTES
    app.add_middleware(
        RequestMiddleware,
        shared=shared,
        access=Access(keys, settings, uploads),
        tracer=tracer,
        echo_request_id=echo_request_id,
    )
    if settings.cors_origins:  # outermost, so that a browser can read errors too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    install_error_handlers(app)
    service = TranscriptionService(shared)
    schemes = [Depends(BEARER)] if len(keys) else []
    api = APIRouter(prefix="/v1", dependencies=schemes, responses=ERRORS)
    client_secrets = ClientSecrets(cluster_key or secrets.token_hex(32), keys)
    app.state.realtime = realtime = RealtimeService(
        shared, client_secrets, is_proxied=not echo_request_id
    )
    _add_audio(api, service)
    _add_models(api, registry)
    if len(keys):
        add_usage(api, usage, keys, None if batches is None else batches.batches)
    add_realtime(app, api, realtime)
    add_batches(api, batches, keys, usage)
    app.include_router(api)
    if settings.asr_webservice:
        add_asr_routes(app, service, keys)
    add_probes(app, shared, service.admission, realtime)
    if settings.metrics != "off":
        add_metrics(app, shared, schemes if settings.metrics == "auto" else [])
    if settings.shows_page:
        add_page(app)
    if not len(keys):  # a browser that shows it could send none
        add_docs(app)
    return app


def _add_audio(api: APIRouter, service: TranscriptionService) -> None:
    @api.post(
        "/audio/transcriptions",
        tags=["audio"],
        summary="Transcribe audio",
        response_model=TranscriptionResponse
        | VerboseTranscriptionResponse
        | DiarizedTranscriptionResponse,
        responses={200: TRANSCRIPTION_OK},
        openapi_extra=TRANSCRIPTION_BODY,
    )
    async def create_transcription(request: Request) -> Response:
        """Audio in, text out. Fields may come in any order."""
        return await service.answer(request, Endpoint(parse_transcription))

    @api.post(
        "/audio/translations",
        tags=["audio"],
        summary="Translate audio into English",
        response_model=TranslationResponse
        | VerboseTranslationResponse
        | DiarizedTranscriptionResponse,
        responses={200: TRANSLATION_OK},
        openapi_extra=TRANSLATION_BODY,
    )
    async def create_translation(request: Request) -> Response:
        """Audio in any language that the model knows in, English text out."""
        return await service.answer(request, Endpoint(parse_translation))

    @api.post(
        "/audio/alignments",
        tags=["audio"],
        summary="Find when a known text is said",
        response_model=AlignmentResponse,
        responses={200: ALIGNMENT_OK},
        openapi_extra=ALIGNMENT_BODY,
    )
    async def create_alignment(request: Request) -> Response:
        """Audio and its text in, words and lines with times out. Not in OpenAI's API."""
        return await service.answer(request, Endpoint(parse_alignment))


def _add_models(api: APIRouter, registry: ModelRegistry) -> None:
    @api.get(
        "/models",
        tags=["models"],
        summary="List the models",
        response_model_exclude_none=True,
    )
    async def list_models() -> ModelListResponse:
        """Every name that `model` may have, apart from aliases such as `whisper-1`."""
        return registry.listing()

    @api.get(
        "/models/{model_id:path}",
        tags=["models"],
        summary="Look one model up",
        response_model_exclude_none=True,
    )
    async def retrieve_model(model_id: str) -> ModelResponse:
        """Names with a slash may be sent plain or as `%2F`."""
        return registry.describe(model_id)
