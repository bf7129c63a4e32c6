"""Transcription by a server, through OpenAI's client and its realtime API."""

from __future__ import annotations

import base64
import json
import math
import re
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console

from cluster.cli.transcribe.job import ALIAS, Job, LiveJob, Target, TranscribeFile, Watcher
from cluster.common.errors import InvalidRequestError, SplitscribeError
from cluster.common.messages import SAMPLE_RATE, Pcm
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
PROGRESS = re.compile(r": ([0-9.]+) of ([0-9.]+) s")
OWNER = "splitscribe"  # of models on servers that stream `verbose_json`
RATE = 24_000  # Hz of live audio for other servers, which OpenAI's takes too
TRANSCRIBED = "conversation.item.input_audio_transcription"
NOT_GIVEN = dict.fromkeys(
    ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob"), 0.0
)  # fields that servers may leave out of a segment
ENDED = "the end of the audio"  # the event id of the update that follows the last audio


def base_url_of(target: Target) -> str:
    base = (target.server or "").rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def client_of(target: Target) -> openai.AsyncOpenAI:
    key = target.api_key or "none"
    own: dict[str, Any] = {}
    if target.is_own:  # the environment's proxies and headers are not for it
        direct = openai.DefaultAsyncHttpxClient(trust_env=False)
        own = {"http_client": direct, "default_headers": {"Authorization": f"Bearer {key}"}}
    return openai.AsyncOpenAI(
        base_url=base_url_of(target),
        api_key=key,
        timeout=openai.Timeout(ANSWER_S, connect=CONNECT_S),
        max_retries=0 if target.is_own else RETRIES,
        **own,
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
    async with _served(TranscriptionParams(model), target) as (server, name):
        try:
            with audio.open("rb") as content:
                async with client_of(server) as client:
                    answer = await client.post(
                        "/audio/alignments",
                        body={"model": name, **form},
                        files={"file": (_name_of(audio), content)},
                        options={"headers": {"Content-Type": "multipart/form-data"}},
                        cast_to=httpx.Response,
                    )
                    return answer.content
        except openai.APIError as error:
            raise _as_ours(error, server) from error


def _name_of(file: Path) -> str:
    return file.name.encode(errors="replace").decode()  # of other bytes than UTF-8


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
                raise _as_ours(error, target) from error
            except openai.APIStatusError:
                pass  # a server without this endpoint may still transcribe
        yield FileTranscriber(client, target, model, job, streams=streams)


class FileTranscriber:
    """A `TranscribeFile`. streams: whether the server sends segments while it works."""

    def __init__(
        self, client: openai.AsyncOpenAI, target: Target, model: str, job: Job, *, streams: bool
    ) -> None:
        audio: Any = client.audio
        translates = job.params.task == "translate"
        self._endpoint = audio.translations if translates else audio.transcriptions
        self._target, self._streams, self._params = target, streams, job.params
        self._asked = {"model": model, "response_format": "verbose_json"}
        self._form: dict[str, Any] = {
            name: text if isinstance(text, str) else list(text) for name, text in job.form.items()
        }

    async def __call__(self, file: Path, watch: Watcher) -> Transcript:
        try:
            segments, answer = await self._watched(file, watch) if self._streams else ([], None)
            if answer is not None:
                return replace(read_answer(answer, self._params), segments=tuple(segments))
            transcript = read_answer(await self._whole(file), self._params)
        except openai.APIError as error:
            raise _as_ours(error, self._target) from error
        watch.segments(transcript.segments[len(segments) :])
        return transcript

    async def _watched(self, file: Path, watch: Watcher) -> tuple[list[Segment], Any]:
        """Return the streamed segments, and the last event; None if the connection broke.

        Raises InvalidRequestError: the server failed.
        """
        segments: list[Segment] = []
        form = {**self._form, "stream": "true"}
        create = self._endpoint.with_streaming_response.create
        with file.open("rb") as content:
            named = (_name_of(file), content)
            async with create(file=named, extra_body=form, **self._asked) as answer:
                lines = answer.iter_lines()
                while (line := await self._next(lines)) is not None:
                    if found := PROGRESS.fullmatch(line):
                        watch.progress(*map(float, found.groups()))
                    if not line.startswith(EVENT):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise InvalidRequestError(event["error"]["message"])
                    if event["type"] == DONE:
                        return segments, event
                    new = [_segment(len(segments), item) for item in event.get("segments", ())]
                    segments += new
                    watch.segments(new)
        return segments, None

    async def _next(self, lines: AsyncIterator[str]) -> str | None:
        try:
            return await anext(lines, None)
        except Exception:  # the client does not wrap its HTTP library's errors here
            if self._target.is_own:
                raise
            return None

    async def _whole(self, file: Path) -> Any:
        create = self._endpoint.with_raw_response.create
        with file.open("rb") as content:
            named = (_name_of(file), content)
            answer = await create(file=named, extra_body=self._form, **self._asked)
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
    words = tuple(Word(**{"probability": math.nan, **word}) for word in item.get("words") or ())
    return Segment(
        **{"id": index, "seek": 0, **NOT_GIVEN, **given, "tokens": tokens, "words": words}
    )


def words_into_segments(segments: Sequence[Segment], words: Iterable[Word]) -> list[Segment]:
    """Give each word to the last segment that begins before it, with the space that APIs strip."""
    own: list[list[Word]] = [[] for _ in segments]
    starts = [segment.start for segment in segments]
    for word in words if segments else ():
        at = max(0, bisect_right(starts, (word.start + word.end) / 2) - 1)
        bare, text = word.word.strip(), segments[at].text
        own[at].append(replace(word, word=f" {bare}" if f" {bare}" in text else bare))
    pairs = zip(segments, own, strict=True)
    return [replace(segment, words=tuple(found)) for segment, found in pairs]


def _as_ours(error: openai.APIError, target: Target) -> SplitscribeError:
    if isinstance(error, openai.APIConnectionError):
        if target.is_own:  # such as a file that grew while it was read
            return InvalidRequestError(f"the work broke off: {error.__cause__ or error}")
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
        # All audio of a fast source may be sent at once to the own server, behind which pings wait.
        options: Any = {"proxy": None, "ping_timeout": None} if target.is_own else {}
        rate = SAMPLE_RATE if target.is_own else RATE
        try:
            connecting = client.realtime.connect(
                extra_query=query, max_retries=0, websocket_connection_options=options
            )
            async with client, connecting as connection:
                session: Any = _session(replace(config, model=model), rate)
                await connection.session.update(session=session)
                yield LiveClient(connection, session, rate)
        except (OSError, openai.OpenAIError, WebSocketException) as error:
            base = base_url_of(target)
            raise InvalidRequestError(f"the live session at {base} ended: {error}") from error


def _session(config: LiveConfig, rate: int) -> dict[str, Any]:
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
                "format": {"type": "audio/pcm", "rate": rate},
                "transcription": {name: value for name, value in transcription.items() if value},
                "turn_detection": {"type": "server_vad"},
            }
        },
    }


class LiveClient:
    """The server bounds the audio that it buffers, so `append` waits for the socket."""

    def __init__(self, connection: Any, session: dict[str, Any], rate: int) -> None:
        self.rate = rate  # of the audio, in Hz
        self._connection = connection
        self._session = session

    async def append(self, pcm: Pcm) -> None:
        """pcm: int16 [n_samples] at `rate`."""
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
