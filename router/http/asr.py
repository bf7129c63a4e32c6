"""`/asr` and `/detect-language` as whisper-asr-webservice has them, for Bazarr and other clients.

Unknown parameters are ignored, as there. Source: whisper-asr-webservice 1.9, `app/webservice.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from enum import Enum
from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBasic
from pydantic import BeforeValidator

from cluster.common.messages import Task
from cluster.common.model.text.languages import language_name
from router.api.formats import TEXT_TYPE, WRITERS
from router.api.forms import Pairs, check_model, parse_transcription
from router.api.openapi import ERRORS
from router.api.params import TranscriptionParams
from router.api.responses import DetectedLanguageResponse
from router.api.subtitles import PLAIN
from router.http.envelope import ASR_PATHS
from router.http.keys import BEARER, KeyRing
from router.http.models import ALIAS
from router.http.service import CheckedRequest, Endpoint, TranscriptionService
from router.http.uploads import BodyShape
from router.transcript import TokenLogprob, Transcript

FILE_FIELD = "audio_file"
ENGINE = "splitscribe"
_TRANSCRIBE, _DETECT = ASR_PATHS
_TAGS: list[str | Enum] = ["whisper-asr-webservice"]
_FORM = {
    "type": "object",
    "required": [FILE_FIELD],
    "properties": {FILE_FIELD: {"type": "string", "format": "binary"}},
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}

# An empty text means not sent, or false.
Flag = Annotated[bool, BeforeValidator(lambda sent: sent or False)]
Encode = Annotated[
    Flag, Query(description="false: the file is 16 kHz mono int16 samples without a header")
]
Model = Annotated[str, Query(description="a name from `GET /v1/models`; left out, whisper-1")]
Asked = Annotated[
    Task,
    BeforeValidator(lambda sent: sent or "transcribe"),
    Query(description="translate: into English"),
]
Output = Annotated[
    Literal["txt", "vtt", "srt", "tsv", "json", "text"],
    BeforeValidator(lambda sent: sent or "txt"),
    Query(description="what is answered; `text` is `txt`"),
]


def add_asr_routes(app: FastAPI, service: TranscriptionService, keys: KeyRing) -> None:
    """Add both routes. They also take a key as the password of Basic authentication, because their
    clients have no field for a key but accept URLs such as `http://any:KEY@host:8000`.
    """
    basic = HTTPBasic(auto_error=False, description="any name, and one of the keys as password")
    schemes = [Depends(BEARER), Depends(basic)] if len(keys) else []
    api = APIRouter(dependencies=schemes, tags=_TAGS, responses=ERRORS)

    @api.post(
        _TRANSCRIBE,
        summary="Transcribe audio, as whisper-asr-webservice does",
        response_class=Response,
        openapi_extra=_BODY,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def asr(
        request: Request,
        encode: Encode = True,
        task: Asked = "transcribe",
        language: Annotated[
            str, Query(description="code or English name; left out, it is detected")
        ] = "",
        initial_prompt: Annotated[str, Query(description="text that came before the audio")] = "",
        vad_filter: Annotated[
            Flag, Query(description="cut by the voice detector's own thresholds")
        ] = False,
        word_timestamps: Annotated[
            Flag, Query(description="find when each word is spoken")
        ] = False,
        output: Output = "txt",
        model: Model = "",
        diarize: Annotated[Flag, Query(description="tell speakers apart by their voices")] = False,
        min_speakers: Annotated[str, Query(description="with diarize: how many at least")] = "",
        max_speakers: Annotated[str, Query(description="with diarize: how many at most")] = "",
        channels: Annotated[str, Query(description="separate: each channel is a speaker")] = "",
    ) -> Response:
        """Audio in, a file out. Errors have `detail` besides `error`."""
        fields = [("model", model or ALIAS), ("response_format", "verbose_json")]
        fields += [("language", language)] if language else []
        fields += [("prompt", initial_prompt)] if initial_prompt else []
        fields += [("chunking_strategy", "server_vad")] if vad_filter else []
        if word_timestamps:
            fields += [("timestamp_granularities[]", each) for each in ("segment", "word")]
        if diarize:
            fields.append(("diarize", "true"))
            fields += [("min_speakers", min_speakers)] if min_speakers else []
            fields += [("max_speakers", max_speakers)] if max_speakers else []
        fields += [("channels", channels)] if channels else []
        suffix = "txt" if output == "text" else output

        def parse(pairs: Pairs, languages: Collection[str]) -> TranscriptionParams:
            params = replace(parse_transcription(pairs, languages), task=task)
            check_model(params, languages)  # again, for `task`
            return params

        def write(
            transcript: Transcript, checked: CheckedRequest, _: list[TokenLogprob]
        ) -> Response:
            name = quote(f"{checked.filename}.{suffix}", safe="")
            named = f'attachment; filename="{name}"'
            headers = {"asr-engine": ENGINE, "content-disposition": named}
            return Response(
                WRITERS[suffix](transcript, PLAIN), media_type=TEXT_TYPE, headers=headers
            )

        return await service.answer(request, Endpoint(parse, write, _shape(encode), tuple(fields)))

    @api.post(
        _DETECT,
        summary="Tell the language of audio, as whisper-asr-webservice does",
        response_model=DetectedLanguageResponse,
        openapi_extra=_BODY,
    )
    async def detect_language(
        request: Request, encode: Encode = True, model: Model = ""
    ) -> Response:
        """The language of 30 s of the audio, from the first speech on."""

        def write(language: str, probability: float) -> Response:
            name = language_name(language)
            found = {"detected_language": name, "language_code": language}
            return JSONResponse({**found, "confidence": probability})

        fields = (("model", model or ALIAS),)
        endpoint = Endpoint(parse_transcription, shape=_shape(encode), fields=fields, detect=write)
        return await service.answer(request, endpoint)

    app.include_router(api)


def _shape(encode: bool) -> BodyShape:
    return BodyShape(FILE_FIELD, takes_json=False, is_headerless=not encode)
