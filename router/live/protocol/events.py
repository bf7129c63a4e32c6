"""Reads the events of OpenAI's realtime transcription from clients, and writes those of the server.
Source: openai-python, `types/realtime`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from cluster.common.errors import InvalidRequestError, PayloadTooLargeError, SplitscribeError
from router.api.documents import base64_pieces, read_json
from router.api.responses import error_body

Event = dict[str, Any]

TRANSCRIPTION = "conversation.item.input_audio_transcription"
_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ID_LENGTH = 21  # characters, which hold 125 random bits
MAX_BESIDE_AUDIO = 65_536  # bytes of an event without its audio
_MAX_EVENT_ID = 512  # characters of a client's event id that an error repeats


@dataclass(frozen=True, slots=True)
class ClientEvent:
    event_id: str | None  # chosen by the client; errors repeat it


@dataclass(frozen=True, slots=True)
class SessionUpdate(ClientEvent):
    session: object  # not validated


@dataclass(frozen=True, slots=True)
class Append(ClientEvent):
    audio: bytes  # in the session's format


@dataclass(frozen=True, slots=True)
class Commit(ClientEvent):
    pass


@dataclass(frozen=True, slots=True)
class Clear(ClientEvent):
    pass


@dataclass(frozen=True, slots=True)
class InvalidEvent(ClientEvent):
    """An invalid message, to be answered with `error`."""

    error: SplitscribeError


def read_event(text: str | bytes | None) -> ClientEvent:
    event_id = None
    try:
        sent = _document(text)
        sent_id = sent.get("event_id")
        event_id = sent_id[:_MAX_EVENT_ID] if isinstance(sent_id, str) else None
        return _read(sent, event_id)
    except InvalidRequestError as error:
        error.__context__ = None  # its frames would keep the text, up to 15 MiB, in memory
        return InvalidEvent(event_id, error.with_traceback(None))


def _document(text: str | bytes | None) -> dict[str, Any]:
    if not isinstance(text, str):
        raise _wrong("Send events as text messages, not as binary ones.")
    try:
        sent = read_json(text.encode(), MAX_BESIDE_AUDIO, ("audio",))
    except PayloadTooLargeError:
        message = f"The event has more than {MAX_BESIDE_AUDIO} bytes beside its audio."
        raise _wrong(message, code="event_too_large") from None
    except InvalidRequestError as error:
        raise _wrong(error.message, code="invalid_json") from None
    except ValueError:
        raise _wrong("The event is not JSON.", code="invalid_json") from None
    if not isinstance(sent, dict):
        raise _wrong("The event is not a JSON object.", code="invalid_json")
    return sent


def _read(sent: Mapping[str, Any], event_id: str | None) -> ClientEvent:
    match sent.get("type"):
        case "input_audio_buffer.append":
            return Append(event_id, _audio(sent.get("audio")))
        case "input_audio_buffer.commit":
            return Commit(event_id)
        case "input_audio_buffer.clear":
            return Clear(event_id)
        case "session.update":
            return SessionUpdate(event_id, sent.get("session"))
        case None:
            raise _wrong(
                "The event has no 'type'.", param="type", code="missing_required_parameter"
            )
        case other:
            shown = repr(other)[:64]
            raise _wrong(
                f"{shown} is not an event of a transcription session. Send 'session.update', "
                f"'input_audio_buffer.append', 'input_audio_buffer.commit' or "
                f"'input_audio_buffer.clear'.",
                param="type",
                code="invalid_value",
            )


def _audio(sent: object) -> bytes:
    message = "'audio' must be a string that holds base64."
    try:
        if isinstance(sent, str):
            return b"".join(base64_pieces(sent))
    except ValueError:
        message = "'audio' is not valid base64."
    raise _wrong(message, param="audio", code="invalid_value")


def _wrong(
    message: str, *, param: str | None = None, code: str = "invalid_event"
) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code=code)


class RealtimeWriter:
    def __init__(self, random: Random) -> None:
        self._random = random

    def new_id(self, kind: str) -> str:
        return f"{kind}_{''.join(self._random.choices(_ID_LETTERS, k=_ID_LENGTH))}"

    def event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "event_id": self.new_id("event"), **fields}

    def item(self, item_id: str, previous: str | None) -> list[Event]:
        item = {
            "id": item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        return [
            self.event(f"conversation.item.{kind}", previous_item_id=previous, item=item)
            for kind in ("added", "done")
        ]

    def transcription(self, kind: str, item_id: str, **fields: Any) -> Event:
        return self.event(f"{TRANSCRIPTION}.{kind}", item_id=item_id, content_index=0, **fields)

    def error(self, error: SplitscribeError, event_id: str | None = None) -> Event:
        return self.event("error", error={**error_body(error)["error"], "event_id": event_id})
