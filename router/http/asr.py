"""`/asr` and `/detect-language`, as whisper-asr-webservice has them: for Bazarr and its like.

The service does the work; here a query becomes an endpoint's way to read and to answer. Off unless
a setting turns it on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import (
    HTTPAuthorizationCredentials,
    HTTPBasic,
    HTTPBasicCredentials,
    HTTPBearer,
)

from cluster.common.model.text.languages import language_name
from router.api.asr import AsrQuery, asr_description, read_detection_query, read_query
from router.api.formats import WRITERS
from router.api.responses import DetectedLanguageResponse
from router.api.subtitles import PLAIN
from router.http.envelope import ASR_PATHS
from router.http.keys import KeyRing
from router.http.models import ALIAS
from router.http.service import CheckedRequest, Endpoint, TranscriptionService
from router.http.uploads import BodyShape
from router.transcript import TokenLogprob, Transcript

FILE_FIELD = "audio_file"
TEXT_TYPE = "text/plain; charset=utf-8"  # that server's, whatever the output is
ENGINE = "splitscribe"
_TRANSCRIBE, _DETECT = ASR_PATHS


def add_asr_routes(api: APIRouter, service: TranscriptionService) -> None:
    """Add both to `api`."""

    @api.post(
        _TRANSCRIBE,
        tags=["whisper-asr-webservice"],
        summary="Transcribe audio, as whisper-asr-webservice does",
        response_class=Response,
        openapi_extra=asr_description(),
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def asr(request: Request) -> Response:
        """Audio in, a file out. Errors have `detail` besides `error`."""
        query = read_query(request.query_params.multi_items(), ALIAS)
        return await service.answer(request, _endpoint(query))

    @api.post(
        _DETECT,
        tags=["whisper-asr-webservice"],
        summary="Tell the language of audio, as whisper-asr-webservice does",
        response_model=DetectedLanguageResponse,
        openapi_extra=asr_description("encode", "model"),
    )
    async def detect_language(request: Request) -> Response:
        """The language of 30 s of the audio, from the first speech on."""
        query = read_detection_query(request.query_params.multi_items(), ALIAS)
        return await service.detect_language(request, _endpoint(query), _detected)


def asr_key_check(keys: KeyRing) -> Callable[..., Awaitable[None]]:
    """A dependency that lets bearers of a key pass, and those who send one as a password.

    Clients of that server have no field for a key, but most of them send what a URL like
    `http://any:KEY@host:8000` says.
    """
    bearer = HTTPBearer(auto_error=False, description="one of the server's API keys")
    basic = HTTPBasic(auto_error=False, description="any name, and one of the keys as password")

    async def check(
        request: Request,
        sent: HTTPAuthorizationCredentials | None = Depends(bearer),  # noqa: B008
        password: HTTPBasicCredentials | None = Depends(basic),  # noqa: B008
    ) -> None:
        key = sent.credentials if sent else password.password if password else None
        request.state.key_owner = keys.owner(None if key is None else key.encode("latin-1"))

    return check


def _endpoint(query: AsrQuery) -> Endpoint:
    def write(
        transcript: Transcript, checked: CheckedRequest, _: list[TokenLogprob] | None
    ) -> Response:
        name = quote(f"{checked.filename}.{query.output}", safe="")
        return Response(
            WRITERS[query.output](transcript, PLAIN),
            media_type=TEXT_TYPE,
            headers={
                "asr-engine": ENGINE,
                "content-disposition": f'attachment; filename="{name}"',
            },
        )

    shape = BodyShape(FILE_FIELD, takes_json=False, is_headerless=query.is_headerless)
    return Endpoint(query.params, write, shape, query.fields)


def _detected(language: str, probability: float) -> Response:
    return JSONResponse(
        {
            "detected_language": language_name(language),
            "language_code": language,
            "confidence": probability,
        }
    )
