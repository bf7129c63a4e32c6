"""Speech through the whole served path in this process: what a user of the checkpoint gets.

Audio workers, encoder, hand-off and decoder with the server's defaults, KV moved in memory.
"""

import asyncio
import tempfile
import wave
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.demo.recipe.mel import SAMPLE_RATE
from cluster.serve.app import local_transcriber
from cluster.settings_sources import load_settings
from router.api.params import TranscriptionParams
from router.interface import RequestContext
from router.transcript import Transcript

AT_ONCE = 4  # files in flight
NO_DEADLINE_S = 24 * 3600.0
PARAMS = TranscriptionParams(model="demo", seed=0)


def transcribe_served(
    checkpoint: Path,
    recordings: Sequence[npt.NDArray[np.float32]],
    on_done: Callable[[], None] = lambda: None,
) -> list[Transcript]:
    """Transcribe recordings, float32 [n] at 16 kHz of any length, each as a file of its own."""
    return asyncio.run(_transcribe_all(checkpoint, recordings, on_done))


async def _transcribe_all(
    checkpoint: Path, recordings: Sequence[npt.NDArray[np.float32]], on_done: Callable[[], None]
) -> list[Transcript]:
    slots = asyncio.Semaphore(AT_ONCE)
    settings = load_settings(None, {"model": str(checkpoint)}, environ={})
    async with local_transcriber(settings) as transcriber:

        async def send(audio: npt.NDArray[np.float32], file: Path) -> Transcript:
            async with slots:
                await asyncio.to_thread(write_wav, file, audio)
                context = RequestContext.unlimited(file.stem, NO_DEADLINE_S)
                result = await transcriber.transcribe(file, PARAMS, context)
                await asyncio.to_thread(file.unlink)
                on_done()
                return result.transcript

        with tempfile.TemporaryDirectory(prefix="splitscribe-demo-") as folder:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(send(audio, Path(folder) / f"{index}.wav"))
                    for index, audio in enumerate(recordings)
                ]
    return [task.result() for task in tasks]


def write_wav(file: Path, audio: npt.NDArray[np.float32]) -> None:
    """16 bit, 16 kHz, mono."""
    pcm = (np.clip(audio, -1, 1) * 32767).astype(np.int16)
    with wave.open(str(file), "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(SAMPLE_RATE)
        wav.writeframes(pcm.tobytes())
