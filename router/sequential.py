"""Sequential mode: decodes the windows that `router.seeking` plans, one after another.

The samples around a window and the file's maximum make its features equal openai/whisper's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cluster.common.messages import (
    FRAMES_PER_S,
    HOP_LENGTH,
    MEL_CONTEXT_SAMPLES,
    WINDOW_FRAMES,
    DecodeOptions,
    FileMel,
    Task,
)
from cluster.common.model.text.tokenizer import WhisperTokenizer
from router.audio.stream import WholeAudio
from router.interface import Update
from router.pipeline import Pipeline, RequestRun, WindowAudio
from router.seeking import Seeker
from router.transcript import Segment, Transcript
from router.transcript_builder import CertainText, token_logprobs


@dataclass(slots=True)
class SequentialRun:
    pipeline: Pipeline
    run: RequestRun
    options: DecodeOptions  # `language` is set once it is known
    tokenizer: WhisperTokenizer
    audio: WholeAudio
    seeker: Seeker
    logprobs: bool = False
    _segments: list[Segment] = field(default_factory=list)
    _text: CertainText = field(default_factory=CertainText)

    async def decode_all(self) -> None:
        """`audio` must be loaded."""
        if self.options.language is None:
            self.options = replace(self.options, language=await self._detect_language())
        while (window := self.seeker.next_window()) is not None:
            audio = await self._window_audio(window.index, window.seek, window.n_frames)
            options = replace(self.options, prompt_tokens=window.prompt_tokens)
            result = await self.pipeline.decode(self.run, audio, options)
            segments = self.seeker.take(result)
            self.run.context.finished_audio((self.seeker.seek - window.seek) / FRAMES_PER_S)
            self._send(segments)

    def transcript(self, task: Task) -> Transcript:
        return Transcript(
            task=task,
            language=self.options.language or "en",
            duration_s=self.audio.duration_s,
            text=self._text.whole,
            segments=tuple(self._segments),
        )

    async def _detect_language(self) -> str:
        audio = await self._window_audio(0, 0, WINDOW_FRAMES)
        options = replace(
            self.options, detect_only=True, temperatures=(0.0,), beam_size=1, best_of=1
        )
        return (await self.pipeline.decode(self.run, audio, options)).language

    async def _window_audio(self, index: int, seek: int, n_frames: int) -> WindowAudio:
        first, last = seek * HOP_LENGTH, (seek + n_frames) * HOP_LENGTH
        n_before = min(first, MEL_CONTEXT_SAMPLES)
        pcm = await self.audio.read(first - n_before, last + MEL_CONTEXT_SAMPLES)
        file_mel = FileMel(n_before, n_frames, self.audio.result.log_max)
        return WindowAudio(index, pcm, n_frames, file_mel)

    def _send(self, segments: tuple[Segment, ...]) -> None:
        self._segments += segments
        text = self._text.add(segments)
        logprobs = token_logprobs(segments, self.tokenizer) if self.logprobs else ()
        if segments:
            self.run.context.update(Update(text, segments, logprobs))
