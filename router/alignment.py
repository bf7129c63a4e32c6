"""Aligns a known text with an upload: finds when each of its words is said.

A first transcription has matched the text with the audio (`router.known_text`). Here the windows
are encoded again, at no cost where KV is kept for reuse, and the decoder aligns the words of each
part without sampling.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cluster.common.messages import SAMPLE_RATE, DecodeOptions
from cluster.common.model.text.tokenizer import WhisperTokenizer
from router.audio.stream import AudioStream
from router.audio.windows import Window
from router.known_text import SaidPart, segments_to_align, words_said
from router.pipeline import Pipeline, RequestRun, WindowAudio
from router.transcript import Word
from router.words import add_words


@dataclass(slots=True)
class AlignmentRun:
    pipeline: Pipeline
    run: RequestRun
    options: DecodeOptions  # of the first transcription
    tokenizer: WhisperTokenizer
    times: dict[int, Word] = field(default_factory=dict)  # by number of the text's word

    async def align_all(
        self, stream: AudioStream, parts: Iterable[SaidPart], max_in_flight: int
    ) -> None:
        """`stream` must yield the same windows as in the first transcription."""
        waiting: defaultdict[int, list[SaidPart]] = defaultdict(list)
        for part in parts:
            waiting[part.heard.window].append(part)
        slots = asyncio.Semaphore(max_in_flight)
        async with asyncio.TaskGroup() as group:
            async for window in stream:
                for part in waiting.pop(window.index, ()):
                    await slots.acquire()
                    task = group.create_task(self._align(window, part))
                    task.add_done_callback(lambda _: slots.release())

    async def _align(self, window: Window, part: SaidPart) -> None:
        heard = part.heard.part
        pcm = window.pcm[round(heard.offset_s * SAMPLE_RATE) - window.start_sample :]
        options = replace(self.options, language=heard.language, known_text=part.tokens)
        audio = WindowAudio.of_samples(window.index, pcm)
        result = await self.pipeline.decode(self.run, audio, options)
        if result.alignment is not None:
            aligned = add_words(
                segments_to_align(part),
                result.alignment,
                self.tokenizer,
                language=heard.language,
                offset_s=heard.offset_s,
                last_speech_s=part.heard.last_speech_s,
            )
            self.times |= words_said(part, aligned)
