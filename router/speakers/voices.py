"""Tells the speakers of a request apart by their voices.

An audio worker finds their turns during the transcription, then each word gets its speaker.
Recordings of known voices are in temporary files during the search.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count, islice, product
from pathlib import Path
from string import ascii_uppercase

from cluster.common.errors import InvalidRequestError
from cluster.common.messages import SAMPLE_RATE
from router.api.params import SpeakerOptions
from router.audio.pool import AudioPool
from router.audio.protocol import SpeakerSearch, as_file
from router.interface import RequestContext, Update
from router.pipeline import RequestRun
from router.speakers.attribution import Attribution, SpeakerTurn, SpokenText
from router.transcript import Segment, Transcript

NO_SPEAKER_MODEL = (
    "this server cannot tell voices apart, as it has no speaker model: its operator can set "
    "'speakers.model' to the ONNX file of a speaker embedding network. Where each speaker has a "
    "channel of the file, send 'channels=separate', which needs none"
)


async def transcribe_voices(
    run: RequestRun,
    transcribe: Callable[[RequestRun], Awaitable[Transcript]],
    turns: Awaitable[list[SpeakerTurn]],
    *,
    words: bool,
) -> Transcript:
    """The transcript with speakers. Segments are held until `turns` are known."""
    context, text = run.context, SpokenText()
    waiting: list[Segment] = []
    done: list[Segment] = []
    listener = context.on_update
    attribution: Attribution | None = None

    def take(update: Update) -> None:
        waiting.extend(update.segments)
        if attribution is None:
            return
        segments = attribution.add(waiting)
        waiting.clear()
        if not words:
            segments = tuple(replace(segment, words=()) for segment in segments)
        done.extend(segments)
        told = Update(text.add(segments), segments)
        if listener is not None and segments:
            listener(told)

    async def label() -> None:
        nonlocal attribution
        attribution = Attribution(await turns)
        take(Update())  # the held segments

    context.on_update = take
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(label())
            transcript = await transcribe(run)
    finally:
        context.on_update = listener
    return replace(transcript, text=text.whole, segments=tuple(done))


async def find_turns(
    audio: AudioPool, upload: Path, options: SpeakerOptions, context: RequestContext
) -> list[SpeakerTurn]:
    """Find who speaks when in the upload. Raises InvalidRequestError for too many known voices,
    InvalidAudioError for the upload or a known voice's recording, and WorkerError.
    """
    if len(options.names) > audio.known_limit:
        raise InvalidRequestError(
            f"'known_speaker_names' has {len(options.names)} items; this server takes "
            f"{audio.known_limit}",
            param="known_speaker_names",
            code="array_above_max_length",
        )
    async with AsyncExitStack() as files:
        opened = map(as_file, options.references)
        paths = [str(await files.enter_async_context(one)) for one in opened]
        least, most = options.min_speakers or 1, options.max_speakers
        if options.num_speakers is not None:
            least = most = options.num_speakers
        search = SpeakerSearch(
            tuple(zip(options.names, paths, strict=True)), least, most, audio.threshold
        )
        with context.beside_windows():  # the pool notices if its worker dies or stands still
            heard = await audio.survey(upload, context, search)
    return [
        SpeakerTurn(start / SAMPLE_RATE, end / SAMPLE_RATE, name_of(number, options.names))
        for start, end, number in heard.result.turns
    ]


def name_of(number: int, known: Sequence[str]) -> str:
    """The known names, then A to Z, AA to ZZ and so on, without names that are taken."""
    if number < len(known):
        return known[number]
    letters = ("".join(one) for n in count(1) for one in product(ascii_uppercase, repeat=n))
    free = (name for name in letters if name not in known)
    name: str = next(islice(free, number - len(known), None))
    return name
