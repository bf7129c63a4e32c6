"""Every field and value that OpenAI's SDK can send is taken, or left for a reason that is written.

What there is comes from the types of the installed package; `make openai-newest` asks the newest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from openai.types import batch_create_params, file_create_params
from openai.types.audio import transcription_create_params as transcriptions
from openai.types.audio.translation_create_params import TranslationCreateParams
from openai.types.realtime import client_secret_create_params
from openai.types.realtime.realtime_transcription_session_create_request_param import (
    RealtimeTranscriptionSessionCreateRequestParam,
)
from pydantic import BaseModel
from typing_extensions import is_typeddict

from router.api.batch_bodies import CreateBatchRequest, Purpose, UploadFields
from router.api.kinds import PARTS
from router.api.request_fields import FIELDS, fields_of
from router.http.models import ALIAS, OPENAI_ALIASES, ModelRegistry, ServedModel
from router.http.realtime.service import ClientSecretRequest
from router.live.protocol import session_config
from router.live.protocol.session_config import ModelNames, SessionConfig, updated
from tests.support.router_fakes import FakeTranscriber

# Of realtime sessions, where what has no effect is ignored: clients end at an error about it.
_NO_RESPONSES = "a transcription session has no responses"
IGNORED = {
    "audio.input.noise_reduction.strength": "no noise is reduced",
    "audio.input.turn_detection.create_response": _NO_RESPONSES,
    "audio.input.turn_detection.interrupt_response": _NO_RESPONSES,
}
VAD = {**session_config.SERVER_VAD, **session_config.SEMANTIC_VAD}
INPUT = "audio.input"
SESSION = {
    *("type", "include", "audio", INPUT),
    *(f"{INPUT}.{name}" for name in session_config.NAMES),
    *(f"{INPUT}.format.{name}" for name in ("type", "rate")),
    f"{INPUT}.noise_reduction.type",
    *(f"{INPUT}.transcription.{name}" for name in session_config.TRANSCRIPTION),
    *(f"{INPUT}.turn_detection.{name}" for name in ("type", *VAD)),
}
Fields = dict[str, tuple[Any, ...]]  # by dotted name, the literal values


def leaves_of(hint: Any) -> Iterator[Any]:
    """What a type is made of: literals, classes, and typed dicts."""
    if get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        for part in get_args(hint):
            yield from leaves_of(part)


def fields_in(*kinds: Any, prefix: str = "") -> Fields:
    """The fields of typed dicts or models, and of those inside them."""
    found: Fields = {}
    for kind in kinds:
        for name, hint in get_type_hints(kind).items():
            if name == "model_config":
                continue
            leaves = list(leaves_of(hint))
            literals = {value: None for leaf in leaves for value in get_args(leaf)}
            found[prefix + name] = (*found.get(prefix + name, ()), *literals)
            for leaf in leaves:
                is_model = isinstance(leaf, type) and issubclass(leaf, BaseModel)
                if is_typeddict(leaf) or is_model:
                    for inner, values in fields_in(leaf, prefix=f"{prefix}{name}.").items():
                        found[inner] = (*found.get(inner, ()), *values)
    return found


TRANSCRIPTIONS = fields_in(*get_args(transcriptions.TranscriptionCreateParams))
TRANSLATIONS = fields_in(TranslationCreateParams)
SESSIONS = fields_in(RealtimeTranscriptionSessionCreateRequestParam)
REGISTRY = ModelRegistry([ServedModel(("tiny",), ("en", "de"), FakeTranscriber())])
MODELS = ModelNames(lambda name: REGISTRY.find(name).languages, lambda one, other: True)


def test_the_types_are_read() -> None:
    assert {"stream", "chunking_strategy.threshold"} <= TRANSCRIPTIONS.keys()
    assert TRANSLATIONS["response_format"] == ("json", "text", "srt", "verbose_json", "vtt")
    assert "high" in SESSIONS["audio.input.turn_detection.eagerness"]


def test_every_field_of_an_audio_endpoint_is_taken() -> None:
    parts = {f"chunking_strategy.{name}" for name in ("type", *PARTS)}
    assert not TRANSCRIPTIONS.keys() - fields_of("transcribe").keys() - parts
    assert not TRANSLATIONS.keys() - fields_of("translate").keys()


@pytest.mark.parametrize("sdk", [TRANSCRIPTIONS, TRANSLATIONS], ids=["speech", "translation"])
def test_every_value_of_a_field_is_taken(sdk: Fields) -> None:
    for name, values in sdk.items():
        field, _, part = name.partition(".")
        if field == "model":
            continue
        kind = FIELDS[field].kind
        for value in values:
            text = str(value)
            sent: Any = [text] if kind.shape == "list" else text
            kind.parse(field, {part or "type": text} if kind.shape == "object" else sent)


NAMED = {
    *TRANSCRIPTIONS["model"],
    *TRANSLATIONS["model"],
    *SESSIONS[f"{INPUT}.transcription.model"],
}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_name_of_a_model_means_the_one_that_is_served(name: str) -> None:
    assert REGISTRY.find(name) is REGISTRY.models[0]


def test_the_page_for_those_who_move_lists_the_names() -> None:
    page = (Path(__file__).parents[4] / "configs/FROM-OPENAI.md").read_text()
    assert all(f"`{name}`" in page for name in (ALIAS, *OPENAI_ALIASES, "diarized_json"))


def test_every_field_of_a_realtime_session_is_taken_or_ignored() -> None:
    assert not SESSIONS.keys() - SESSION - IGNORED.keys()
    assert not SESSION & IGNORED.keys()


def test_every_value_of_a_realtime_session_is_taken() -> None:
    """What is no such value is refused: the last lines see that these are looked at."""
    config = updated(
        SessionConfig(), {"audio": {"input": {"transcription": {"model": "tiny"}}}}, MODELS
    )

    def send(name: str, value: Any) -> None:
        *path, last = name.split(".")
        inner = {last: [value] if name == "include" else value}
        if last == "eagerness":
            inner["type"] = "semantic_vad"
        updated(config, reduce(lambda below, key: {key: below}, reversed(path), inner), MODELS)

    for name, values in SESSIONS.items():
        for value in values:
            send(name, value)
    for name in ("audio.input.turn_detection.eagerness", "audio.input.format.type", "type"):
        with pytest.raises(Exception, match="x"):
            send(name, "x")


@pytest.mark.parametrize(
    ("ours", "sdk"),
    [
        (CreateBatchRequest, batch_create_params.BatchCreateParams),
        (UploadFields, file_create_params.FileCreateParams),
        (ClientSecretRequest, client_secret_create_params.ClientSecretCreateParams),
    ],
)
def test_every_field_of_batches_files_and_client_secrets_is_taken(ours: Any, sdk: Any) -> None:
    """A session is a client's own JSON there, and is read as in an event."""
    wanted = {name for name in fields_in(sdk) if not name.startswith("session.")}
    assert not wanted - fields_in(ours).keys() - {"file"}


def test_every_purpose_of_a_file_is_taken() -> None:
    assert set(fields_in(file_create_params.FileCreateParams)["purpose"]) == set(get_args(Purpose))
