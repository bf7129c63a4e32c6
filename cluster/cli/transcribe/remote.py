"""Transcription through a running server, by OpenAI's client.

Sends a job's form with each file, several at a time, and makes a `Transcript` again of the
verbose_json that comes back. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai

from cluster.cli.transcribe.job import Job, Target, TranscribeFile, Watcher
from cluster.errors import InvalidRequestError, SplitscribeError
from cluster.model.text.languages import language_code
from cluster.settings import BUNDLED_MODEL
from router.api.params import TranscriptionParams
from router.transcript import Segment, Transcript, Word

ALIAS = "whisper-1"  # every server's default model
CONNECT_S = 10.0
ANSWER_S = 24 * 3600.0  # the server has its own, shorter deadline
RETRIES = 5  # where the server is full


def base_url_of(target: Target) -> str:
    """Where the server's API is: its URL may be said with "/v1" and without."""
    base = (target.server or "").rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


@asynccontextmanager
async def through_server(job: Job) -> AsyncIterator[TranscribeFile]:
    """Make sure that a server answers.

    Raises:
        InvalidRequestError: none does, or it does not know the key.
    """
    server = (job.target.server or "").rstrip("/")
    client = openai.AsyncOpenAI(
        base_url=base_url_of(job.target),
        api_key=job.target.api_key or "none",
        timeout=openai.Timeout(ANSWER_S, connect=CONNECT_S),
        max_retries=RETRIES,
    )
    form = {name: text if isinstance(text, str) else list(text) for name, text in job.form.items()}
    model = ALIAS if job.params.model == BUNDLED_MODEL else job.params.model
    audio = client.audio
    translates = job.params.task == "translate"
    endpoint: Any = audio.translations if translates else audio.transcriptions

    async def transcribe_one(file: Path, watcher: Watcher) -> Transcript:
        try:
            with file.open("rb") as content:
                answer = await endpoint.with_raw_response.create(
                    model=model, file=content, response_format="verbose_json", extra_body=form
                )
        except openai.APIError as error:
            raise _told(error, server) from error
        transcript = read_answer(answer.content, job.params)
        watcher.progress(transcript.duration_s, transcript.duration_s)
        watcher.segments(transcript.segments)
        return transcript

    async with client:
        try:
            await client.with_options(max_retries=0).models.list()
        except (openai.APIConnectionError, openai.AuthenticationError) as error:
            raise _told(error, server) from error
        except openai.APIStatusError:
            pass  # a server without that list may still transcribe
        yield transcribe_one


def read_answer(content: bytes, params: TranscriptionParams) -> Transcript:
    """A verbose_json body as a transcript.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        answer = json.loads(content)
        segments = [_segment(i, item) for i, item in enumerate(answer.get("segments") or ())]
        words = [
            Word(item["start"], item["end"], item["word"], item.get("probability", math.nan))
            for item in answer.get("words") or ()
        ]
        return Transcript(
            task=params.task,
            language=language_code(answer["language"]) or answer["language"],
            duration_s=float(answer["duration"]),
            text=answer["text"],
            segments=tuple(words_into_segments(segments, words)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequestError(
            f"the server's answer is no verbose_json transcript: {content[:80]!r}"
        ) from error


def _segment(index: int, item: dict[str, Any]) -> Segment:
    return Segment(
        id=item.get("id", index),
        seek=item.get("seek", 0),
        start=item["start"],
        end=item["end"],
        text=item["text"],
        tokens=tuple(item.get("tokens") or ()),
        temperature=item.get("temperature", 0.0),
        avg_logprob=item.get("avg_logprob", 0.0),
        compression_ratio=item.get("compression_ratio", 0.0),
        no_speech_prob=item.get("no_speech_prob", 0.0),
    )


def words_into_segments(segments: Iterable[Segment], words: Sequence[Word]) -> list[Segment]:
    """Give each segment its words; the API lists those of the whole answer, in order."""
    found: list[Segment] = []
    n_taken = 0
    for segment in segments:
        own = _words_of(segment, words[n_taken:])
        n_taken += len(own)
        found.append(replace(segment, words=tuple(own)))
    return found


def _words_of(segment: Segment, words: Sequence[Word]) -> list[Word]:
    """The first of `words`, as many as the segment's text begins with.

    The API strips spaces, some servers punctuation too: both are taken from the text. What
    stands between two words belongs to the first one up to a space, and then to the second.
    """
    own: list[Word] = []
    cursor = 0
    for word in words:
        bare = word.word.strip()
        at = segment.text.find(bare, cursor)
        between = segment.text[cursor : max(at, 0)]
        if at < 0 or any(letter.isalnum() for letter in between):
            break  # a later segment's
        if own:
            n_stay = len(between.partition(" ")[0])
            own[-1] = replace(own[-1], word=own[-1].word + between[:n_stay])
            between = between[n_stay:]
        own.append(replace(word, word=between + bare))
        cursor = at + len(bare)
    if own:
        own[-1] = replace(own[-1], word=own[-1].word + segment.text[cursor:].rstrip())
    return own


def _told(error: openai.APIError, base: str) -> SplitscribeError:
    """What the server said, in one line."""
    if isinstance(error, openai.APIConnectionError):
        return InvalidRequestError(f"no server answers at {base}: {error}")
    body: Any = error.body
    told = body.get("message") if isinstance(body, dict) else None
    return InvalidRequestError(" ".join(str(told or error.message).split()))
