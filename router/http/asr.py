"""`/asr` and `/detect-language`, as whisper-asr-webservice has them: for Bazarr and its like.

The service does the work; here a query becomes an endpoint's way to read and to answer. Off unless
a setting turns it on.

As there, a parameter that is unknown is ignored. Source: whisper-asr-webservice 1.9,
`app/webservice.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import cast, get_args
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import (
    HTTPAuthorizationCredentials,
    HTTPBasic,
    HTTPBasicCredentials,
    HTTPBearer,
)

from cluster.common.errors import InvalidRequestError, UnsupportedValueError
from cluster.common.messages import Task
from cluster.common.model.text.languages import language_name
from router.api.formats import WRITERS
from router.api.forms import Pairs, check_model, parse_transcription
from router.api.kinds import Choice, Schema, shown
from router.api.params import TranscriptionParams
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


TASKS: tuple[Task, ...] = get_args(Task)
OUTPUTS = tuple(WRITERS)
TEXT = "text"  # what that server's documentation calls txt
TRUE = ("true", "1", "yes", "on", "t", "y")  # as pydantic reads them there
FALSE = ("false", "0", "no", "off", "f", "n", "")


@dataclass(frozen=True, slots=True)
class AsrQuery:
    """A checked query.

    is_headerless: the file is 16 kHz mono int16 samples without a header. output: of WRITERS.
    fields: for `router.api.forms`.
    """

    is_headerless: bool
    task: Task = "transcribe"
    output: str = "txt"
    fields: tuple[tuple[str, str], ...] = ()

    def params(self, pairs: Pairs, languages: Collection[str]) -> TranscriptionParams:
        """The request. Raises InvalidRequestError, as `parse_transcription` does."""
        params = replace(parse_transcription(pairs, languages), task=self.task)
        check_model(params, languages)  # once more: now it may be a translation
        return params


def read_query(items: Iterable[tuple[str, str]], model: str) -> AsrQuery:
    """Check the query of `/asr`; `model` is used where it names none, as that server's never do.

    Raises:
        UnsupportedValueError: it asks for speakers.
        InvalidRequestError: a value is no such thing.
    """
    sent = dict(items)
    if _flag(sent, "diarize", False):
        raise UnsupportedValueError("'diarize' is not supported by this server", param="diarize")
    task = cast(Task, Choice(TASKS).parse("task", sent.get("task") or "transcribe"))
    output = sent.get("output") or "txt"
    output = Choice(OUTPUTS).parse("output", "txt" if output == TEXT else output)
    fields = [("model", sent.get("model") or model), ("response_format", "verbose_json")]
    fields += [("language", sent["language"])] if sent.get("language") else []
    fields += [("prompt", sent["initial_prompt"])] if sent.get("initial_prompt") else []
    if _flag(sent, "vad_filter", False):
        fields.append(("chunking_strategy", "server_vad"))
    if _flag(sent, "word_timestamps", False):
        fields += [("timestamp_granularities[]", each) for each in ("segment", "word")]
    return AsrQuery(
        is_headerless=not _flag(sent, "encode", True),
        task=task,
        output=output,
        fields=tuple(fields),
    )


def read_detection_query(items: Iterable[tuple[str, str]], model: str) -> AsrQuery:
    """Check the query of `/detect-language`. Raises InvalidRequestError."""
    sent = dict(items)
    fields = (("model", sent.get("model") or model),)
    return AsrQuery(is_headerless=not _flag(sent, "encode", True), fields=fields)


def _flag(sent: dict[str, str], name: str, default: bool) -> bool:
    text = sent.get(name)
    if text is None:
        return default
    if text.strip().lower() in TRUE:
        return True
    if text.strip().lower() in FALSE:
        return False
    raise InvalidRequestError(f"'{name}' must be true or false, not {shown(text)}", param=name)


# ------------------------------------------------------------------- what /docs says of them

_BOOLEAN: Schema = {"type": "boolean"}
_TEXT: Schema = {"type": "string"}
_PARAMETERS: dict[str, tuple[Schema, str]] = {
    "encode": (
        {**_BOOLEAN, "default": True},
        "false: the file is 16 kHz mono int16 samples without a header",
    ),
    "task": ({**Choice(TASKS).schema(), "default": "transcribe"}, "translate: into English"),
    "language": (_TEXT, "code or English name; left out, it is detected"),
    "initial_prompt": (_TEXT, "text that came before the audio"),
    "vad_filter": ({**_BOOLEAN, "default": False}, "cut by the voice detector's own thresholds"),
    "word_timestamps": ({**_BOOLEAN, "default": False}, "find when each word is spoken"),
    "output": ({**Choice(OUTPUTS).schema(), "default": "txt"}, "what is answered"),
    "model": (_TEXT, "a name from `GET /v1/models`; left out, the first one"),
}


def asr_description(*names: str) -> Schema:
    """OpenAPI of an endpoint with the parameters of these names and the file in a form."""
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, (schema, text) in _PARAMETERS.items()
        if name in names or not names
    ]
    form = {
        "type": "object",
        "required": ["audio_file"],
        "properties": {"audio_file": {"type": "string", "format": "binary"}},
    }
    body = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    return {"parameters": parameters, "requestBody": body}
