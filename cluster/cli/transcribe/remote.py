"""Transcription through a running server, by OpenAI's client and its realtime API."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console

from cluster.cli.transcribe.job import Job, LiveJob, Target, TranscribeFile, Watcher
from cluster.common.errors import InvalidRequestError, SplitscribeError
from cluster.common.messages import Pcm
from cluster.common.model.text.languages import language_code
from router.api.params import TranscriptionParams
from router.live.interface import LiveEvent, TextDelta, TurnCompleted, TurnFailed
from router.transcript import Channel, Segment, Transcript, Word

CONNECT_S = 10.0
ANSWER_S = 24 * 3600.0  # servers have a shorter deadline of their own
RETRIES = 5  # while the server is full
RATE = 24_000  # Hz of live audio, which OpenAI's own server takes too
TRANSCRIBED = "conversation.item.input_audio_transcription"
NOT_GIVEN = dict.fromkeys(
    ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob"), 0.0
)  # fields that servers may leave out of a segment
ENDED = "the end of the sound"  # the event id of the update that follows the last audio


def base_url_of(target: Target) -> str:
    base = (target.server or "").rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def client_of(target: Target) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=base_url_of(target),
        api_key=target.api_key or "none",
        timeout=openai.Timeout(ANSWER_S, connect=CONNECT_S),
        max_retries=RETRIES,
    )


async def align_through_server(
    audio: Path, model: str, form: Mapping[str, str], target: Target
) -> bytes:
    content = await asyncio.to_thread(audio.read_bytes)
    try:
        async with client_of(target) as client:
            answer = await client.post(
                "/audio/alignments",
                body={"model": model, **form},
                files={"file": (audio.name, content)},
                options={"headers": {"Content-Type": "multipart/form-data"}},
                cast_to=httpx.Response,
            )
            return answer.content
    except openai.APIError as error:
        raise _told(error, target.server or "") from error


@asynccontextmanager
async def through_server(job: Job, err: Console) -> AsyncIterator[TranscribeFile]:
    """Raises InvalidRequestError: no server answers, or it refuses the key."""
    server = (job.target.server or "").rstrip("/")
    client = client_of(job.target)
    form = {name: text if isinstance(text, str) else list(text) for name, text in job.form.items()}
    audio = client.audio
    translates = job.params.task == "translate"
    endpoint: Any = audio.translations if translates else audio.transcriptions

    async def transcribe_one(file: Path, watcher: Watcher) -> Transcript:
        try:
            with file.open("rb") as content:
                answer = await endpoint.with_raw_response.create(
                    model=job.params.model,
                    file=content,
                    response_format="verbose_json",
                    extra_body=form,
                )
        except openai.APIError as error:
            raise _told(error, server) from error
        transcript = read_answer(answer.content, job.params)
        watcher.segments(transcript.segments)
        return transcript

    async with client:
        try:
            model = await client.with_options(max_retries=0).models.retrieve(job.params.model)
            if about := getattr(model, "description", None):
                err.print(f"splitscribe: {about}", markup=False)
        except (openai.APIConnectionError, openai.AuthenticationError) as error:
            raise _told(error, server) from error
        except openai.APIStatusError:
            pass  # a server without this endpoint may still transcribe
        yield transcribe_one


def read_answer(content: bytes, params: TranscriptionParams) -> Transcript:
    try:
        answer = json.loads(content)
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
        return Transcript(
            task=params.task,
            language=language_code(answer["language"]) or answer["language"],
            duration_s=float(answer["duration"]),
            text=answer["text"],
            segments=tuple(words_into_segments(segments, words)),
            channels=tuple(Channel(**one) for one in answer.get("channels") or ()),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequestError(
            f"the server's answer is not a verbose_json transcript: {content[:80]!r}"
        ) from error


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


def _told(error: openai.APIError, base: str) -> SplitscribeError:
    if isinstance(error, openai.APIConnectionError):
        return InvalidRequestError(f"no server answers at {base}: {error}")
    body: Any = error.body
    told = body.get("message") if isinstance(body, dict) else None
    return InvalidRequestError(" ".join(str(told or error.message).split()))


@asynccontextmanager
async def live_through_server(job: LiveJob) -> AsyncIterator[RemoteLiveClient]:
    """Raises InvalidRequestError: no server answers, or it refuses live sessions."""
    from websockets.exceptions import WebSocketException  # openai needs it only for sessions

    base = base_url_of(job.target)
    client = client_of(job.target)
    query = {"intent": "transcription"}
    try:
        async with client, client.realtime.connect(extra_query=query, max_retries=0) as connection:
            session: Any = _session(job)
            await connection.session.update(session=session)
            yield RemoteLiveClient(connection, session)
    except (OSError, openai.OpenAIError, WebSocketException) as error:
        raise InvalidRequestError(f"the live session at {base} ended: {error}") from error


def _session(job: LiveJob) -> dict[str, Any]:
    config = job.config
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


class RemoteLiveClient:
    """The server bounds the audio that it buffers, so `append` waits for the socket."""

    rate = RATE
    unsent_s = 0.0

    def __init__(self, connection: Any, session: dict[str, Any]) -> None:
        self._connection = connection
        self._session = session

    async def append(self, pcm: Pcm) -> None:
        audio = base64.b64encode(pcm.astype("<i2").tobytes()).decode()
        await self._connection.input_audio_buffer.append(audio=audio)

    async def end(self) -> None:
        """Commit the last turn; the answer to the update that follows confirms it."""
        await self._connection.input_audio_buffer.commit(event_id=ENDED)
        await self._connection.session.update(session=self._session, event_id=ENDED)

    async def events(self) -> AsyncIterator[LiveEvent]:
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
