"""The turns of an upload's speakers, as an audio worker finds them.

Writes the recordings of known voices to files for the worker, and gives speakers their names. A
worker that dies costs a second search of the upload. Knows nothing of text.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from string import ascii_uppercase

from cluster.common.errors import WorkerError
from cluster.common.messages import SAMPLE_RATE
from router.audio.pool import AudioPool
from router.audio.protocol import SpeakerSearch
from router.interface import RequestContext
from router.speakers.options import SpeakerOptions
from router.speakers.turns import SpeakerTurn

logger = logging.getLogger(__name__)

MAX_SEARCHES = 3  # of one upload whose worker dies


async def find_turns(
    audio: AudioPool, upload: Path, options: SpeakerOptions, context: RequestContext
) -> list[SpeakerTurn]:
    """Who speaks when in the upload, by voice; those that are not known are A, B, C and so on.

    Raises:
        InvalidAudioError: the upload, or a known voice's recording, by its name.
        WorkerError: audio workers died on the upload, one after another.
    """
    with tempfile.TemporaryDirectory(prefix="splitscribe-voices-") as folder:
        paths = await asyncio.to_thread(_written, Path(folder), options.references)
        least, most = options.min_speakers or 1, options.max_speakers
        if options.num_speakers is not None:
            least = most = options.num_speakers
        search = SpeakerSearch(tuple(zip(options.names, paths, strict=True)), least, most)
        for tries in count(1):
            try:
                heard = await audio.survey(upload, context, search)
                break
            except WorkerError:
                if tries == MAX_SEARCHES:
                    raise
                logger.warning("speakers are searched for again: the audio worker died")
    return [
        SpeakerTurn(start / SAMPLE_RATE, end / SAMPLE_RATE, name_of(number, options.names))
        for start, end, number in heard.turns
    ]


def _written(folder: Path, references: Sequence[bytes]) -> list[str]:
    """The references as files; returns their paths."""
    paths = []
    for i, content in enumerate(references):
        path = folder / str(i)
        path.write_bytes(content)
        paths.append(str(path))
    return paths


def name_of(number: int, known: Sequence[str]) -> str:
    """The known voices' names, then A to Z, AA to ZZ, without those that are taken."""
    if number < len(known):
        return known[number]
    letters = (first + last for first in ("", *ascii_uppercase) for last in ascii_uppercase)
    free = (name for name in letters if name not in known)
    name: str = next(islice(free, number - len(known), None))
    return name
