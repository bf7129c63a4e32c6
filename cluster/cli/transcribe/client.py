"""Transcription by a server, through OpenAI's client and its realtime API."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console

from cluster.cli.transcribe.job import ALIAS, Job, LiveJob, Target, TranscribeFile
from cluster.common.errors import InvalidRequestError, SplitscribeError
from cluster.common.messages import Pcm
from cluster.common.model.text.languages import language_code
from router.api.params import TranscriptionParams
from router.live.interface import (
    LiveConfig,
    LiveEvent,
    TextDelta,
    TurnCompleted,
    TurnFailed,
)
from router.transcript import Channel, Segment, Transcript, Word

CONNECT_S = 10.0
ANSWER_S = 24 * 3600.0  # servers have a shorter deadline of their own
RETRIES = 5  # while the server is full
EVENT, DONE = "data: {", "transcript.text.done"
OWNER = "splitscribe"  # of models on servers that stream `verbose_json`
RATE = 24_000  # Hz of live audio, which OpenAI's own server takes too
TRANSCRIBED = "conversation.item.input_audio_transcription"
NOT_GIVEN = dict.fromkeys(
    ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob"), 0.0
)  # fields that servers may leave out of a segment
ENDED = "the end of the audio"  # the event id of the update that follows the last audio


def base_url_of(target: Target) -> str:
    base = (target.server or "").rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def client_of(target: Target) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=base_url_of(target),
        api_key=target.api_key or "none",
        timeout=openai.Timeout(ANSWER_S, connect=CONNECT_S),
        max_retries=0 if target.is_own else RETRIES,
    )


@asynccontextmanager
async def _served(params: TranscriptionParams, target: Target) -> AsyncIterator[tuple[Target, str]]:
    """Yield the server for the work, and the model's name there."""
    if target.server:
        yield target, params.model
        return
    from cluster.cli.transcribe.local import own_server

    async with own_server(params, target) as own:
        yield own, ALIAS


async def align(audio: Path, model: str, form: Mapping[str, str], target: Target) -> bytes:
    """Return the response body of the alignment endpoint. Raises SplitscribeError."""
    content = await asyncio.to_thread(audio.read_bytes)
    async with _served(TranscriptionParams(model), target) as (server, name):
        try:
            async with client_of(server) as client:
                answer = await client.post(
                    "/audio/alignments",
                    body={"model": name, **form},
                    files={"file": (audio.name, content)},
                    options={"headers": {"Content-Type": "multipart/form-data"}},
                    cast_to=httpx.Response,
                )
                return answer.content
        except openai.APIError as error:
            raise _told(error, server) from error


@asynccontextmanager
async def opened(job: Job, err: Console) -> AsyncIterator[TranscribeFile]:
    """Raises ConfigurationError, or InvalidRequestError: no server answers, it refuses the key, or
    the model cannot do what is asked.
    """
    async with _served(job.params, job.target) as (target, model), client_of(target) as client:
        streams = target.is_own
        if not streams:
            try:
                known = await client.with_options(max_retries=0).models.retrieve(model)
                streams = known.owned_by == OWNER
                if about := getattr(known, "description", None):
                    err.print(f"splitscribe: {about}", markup=False)
            except (openai.APIConnectionError, openai.AuthenticationError) as error:
                raise _told(error, target) from error
            except openai.APIStatusError:
                pass  # a server without this endpoint may still transcribe
        yield Files(client, target, model, job, streams=streams)


class Files:
    """A `TranscribeFile`. streams: whether the server tells segments before the whole answer."""

    def __init__(
        self, client: openai.AsyncOpenAI, target: Target, model: str, job: Job, *, streams: bool
    ) -> None:
        audio: Any = client.audio
        translates = job.params.task == "translate"
        self._endpoint = audio.translations if translates else audio.transcriptions
        self._target, self._streams, self._params = target, streams, job.params
        form = {
            name: text if isinstance(text, str) else list(text) for name, text in job.form.items()
        }
        self._asked = {"model": model, "response_format": "verbose_json"}
        self._form: dict[str, Any] = form

    async def __call__(self, file: Path, tell: Callable[[Sequence[Segment]], None]) -> Transcript:
        told = 0
        answer: dict[str, Any] | None = None
        try:
            if self._streams:
                async for event in self._events(file):
                    if event["type"] == DONE:
                        answer = event
                    elif segments := event.get("segments"):
                        tell([_segment(told + i, item) for i, item in enumerate(segments)])
                        told += len(segments)
            answer = answer or await self._whole(file)
        except openai.APIError as error:
            raise _told(error, self._target) from error
        transcript = read_answer(answer, self._params)
        tell(transcript.segments[told:])
        return transcript

    async def _events(self, file: Path) -> AsyncIterator[dict[str, Any]]:
        """Yield events; none after the connection broke. Raises InvalidRequestError."""
        form = {**self._form, "stream": "true"}
        create = self._endpoint.with_streaming_response.create
        with file.open("rb") as content:
            async with create(file=content, extra_body=form, **self._asked) as answer:
                lines = answer.iter_lines()
                while (line := await self._next(lines)) is not None:
                    if line.startswith(EVENT):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise InvalidRequestError(event["error"]["message"])
                        yield event

    async def _next(self, lines: AsyncIterator[str]) -> str | None:
        try:
            return await anext(lines, None)
        except Exception:  # the client does not wrap its HTTP library's errors here
            if self._target.is_own:
                raise
            return None

    async def _whole(self, file: Path) -> Any:
        with file.open("rb") as content:
            create = self._endpoint.with_raw_response.create
            answer = await create(file=content, extra_body=self._form, **self._asked)
        try:
            return json.loads(answer.content)
        except ValueError as error:
            raise _no_transcript(answer.content) from error


def read_answer(answer: Any, params: TranscriptionParams) -> Transcript:
    """Read a `verbose_json` document. Raises InvalidRequestError."""
    try:
        segments = [_segment(i, item) for i, item in enumerate(answer.get("segments") or ())]
        words = [
            Word(
                item["start"],
                item["end"],
                item["word"],
                item.get("probability", math.nan),
                item.get("speaker"),
            )
            for item in answer.get("words") or ()
        ]
        language = answer.get("source_language") or answer["language"]
        return Transcript(
            task=params.task,
            language=language_code(language) or language,
            duration_s=float(answer["duration"]),
            text=answer["text"],
            segments=tuple(words_into_segments(segments, words)),
            channels=tuple(Channel(**one) for one in answer.get("channels") or ()),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_transcript(answer) from error


def _no_transcript(answer: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"the server's answer is not a verbose_json transcript: {str(answer)[:80]}"
    )


def _segment(index: int, item: dict[str, Any]) -> Segment:
    """Times and text are required; other servers leave out the other fields."""
    given = {one.name: item[one.name] for one in fields(Segment) if one.name in item}
    tokens = tuple(item.get("tokens") or ())
    return Segment(**{"id": index, "seek": 0, **NOT_GIVEN, **given, "tokens": tokens, "words": ()})


def words_into_segments(segments: Iterable[Segment], words: Sequence[Word]) -> list[Segment]:
    """Give each segment the next words that its text begins with.

    The API strips spaces from words, and some servers strip punctuation; the text restores both.
    """
    found: list[Segment] = []
    waiting = deque(words)
    for segment in segments:
        text, cursor = segment.text, 0
        begins: list[int] = []  # where each word begins, with punctuation before it
        for word in waiting:
            bare = word.word.strip()
            at = text.find(bare, cursor)
            between = text[cursor : max(at, 0)]
            if at < 0 or any(letter.isalnum() for letter in between):
                break  # belongs to a later segment
            begins.append(cursor + len(between.partition(" ")[0]) if begins else 0)
            cursor = at + len(bare)
        spans = pairwise((*begins, len(text.rstrip())))
        own = [replace(waiting.popleft(), word=text[first:end]) for first, end in spans]
        found.append(replace(segment, words=tuple(own)))
    return found


def _told(error: openai.APIError, target: Target) -> SplitscribeError:
    if isinstance(error, openai.APIConnectionError):
        base = (target.server or "").rstrip("/")
        return InvalidRequestError(f"no server answers at {base}: {error}")
    body: Any = error.body
    told = body.get("message") if isinstance(body, dict) else None
    return InvalidRequestError(" ".join(str(told or error.message).split()))


@asynccontextmanager
async def live_client(job: LiveJob) -> AsyncIterator[LiveClient]:
    """Raises as `opened`, or InvalidRequestError: the session ended too early."""
    from websockets.exceptions import WebSocketException  # openai needs it only for sessions

    config = job.config
    params = TranscriptionParams(config.model, language=config.language)
    query = {"intent": "transcription"}
    async with _served(params, job.target) as (target, model):
        client = client_of(target)
        try:
            async with (
                client,
                client.realtime.connect(extra_query=query, max_retries=0) as connection,
            ):
                session: Any = _session(replace(config, model=model))
                await connection.session.update(session=session)
                yield LiveClient(connection, session)
        except (OSError, openai.OpenAIError, WebSocketException) as error:
            base = base_url_of(target)
            raise InvalidRequestError(f"the live session at {base} ended: {error}") from error


def _session(config: LiveConfig) -> dict[str, Any]:
    transcription: dict[str, Any] = {
        "model": config.model,
        "language": config.language,
        "prompt": config.prompt,
        "keywords": list(config.keywords),
    }
    return {
        "type": "transcription",
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": RATE},
                "transcription": {name: value for name, value in transcription.items() if value},
                "turn_detection": {"type": "server_vad"},
            }
        },
    }


class LiveClient:
    """The server bounds the audio that it buffers, so `append` waits for the socket."""

    def __init__(self, connection: Any, session: dict[str, Any]) -> None:
        self._connection = connection
        self._session = session

    async def append(self, pcm: Pcm) -> None:
        """pcm: int16 [n_samples] at `RATE`."""
        audio = base64.b64encode(pcm.astype("<i2").tobytes()).decode()
        await self._connection.input_audio_buffer.append(audio=audio)

    async def end(self) -> None:
        """Commit the last turn; the answer to the update that follows confirms it."""
        await self._connection.input_audio_buffer.commit(event_id=ENDED)
        await self._connection.session.update(session=self._session, event_id=ENDED)

    async def events(self) -> AsyncIterator[LiveEvent]:
        """Yield the text of turns and their ends, until the last turn after `end`."""
        open_turns: set[str] = set()
        n_updated = 0
        async for event in self._connection:
            kind = event.type
            if kind == "session.updated":
                n_updated += 1  # first at the start, then at the end
            elif kind == "input_audio_buffer.committed":
                open_turns.add(event.item_id)
            elif kind == f"{TRANSCRIBED}.delta":
                yield TextDelta(0, event.delta or "")
            elif kind == f"{TRANSCRIBED}.completed":
                open_turns.discard(event.item_id)
                yield TurnCompleted(0, event.transcript, 0.0, None)
            elif kind == f"{TRANSCRIBED}.failed":
                open_turns.discard(event.item_id)
                yield TurnFailed(0, SplitscribeError(event.error.message))
            elif kind == "error" and event.error.event_id != ENDED:
                raise InvalidRequestError(f"the server refused: {event.error.message}")
            if n_updated > 1 and not open_turns:
                return
