"""Pipecat's realtime STT in a pipeline: WS_URL, MODEL, PCM (int16, 24 kHz), VAD, WORDS to wait for.

VAD: "server", or "local", where the client says itself that the speaker has stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService

RATE, PIECE = 24_000, 1_200  # 50 ms


class Collector(FrameProcessor):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = words
        self.found: dict[str, list[str]] = {"finals": [], "interims": [], "errors": []}
        self.is_complete = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TranscriptionFrame):
            self.found["finals"].append(frame.text)
            if len(" ".join(self.found["finals"]).split()) >= self.words:
                self.is_complete.set()
        elif isinstance(frame, InterimTranscriptionFrame):
            self.found["interims"].append(frame.text)
        elif isinstance(frame, ErrorFrame):
            self.found["errors"].append(frame.error)
        await self.push_frame(frame, direction)


async def main(pcm: bytes, url: str, model: str, vad: str, words: int) -> None:
    collector = Collector(words)
    service = OpenAIRealtimeSTTService(
        api_key="none",
        base_url=url,
        turn_detection={"type": "server_vad"} if vad == "server" else False,
        settings=OpenAIRealtimeSTTService.Settings(model=model),
    )
    params = PipelineParams(audio_in_sample_rate=RATE)
    task = PipelineTask(Pipeline([service, collector]), params=params)

    @task.event_handler("on_pipeline_error")
    async def on_error(_: PipelineTask, frame: ErrorFrame) -> None:
        collector.found["errors"].append(frame.error)

    async def feed() -> None:
        if vad == "local":
            await task.queue_frame(VADUserStartedSpeakingFrame())
        for start in range(0, len(pcm), 2 * PIECE):
            piece = pcm[start : start + 2 * PIECE]
            await task.queue_frame(
                InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1)
            )
            await asyncio.sleep(PIECE / RATE)
        if vad == "local":
            await task.queue_frame(VADUserStoppedSpeakingFrame())
        try:
            with contextlib.suppress(TimeoutError):  # what came is told all the same
                await asyncio.wait_for(collector.is_complete.wait(), 60)
        finally:
            await task.cancel()

    await asyncio.gather(PipelineRunner(handle_sigint=False).run(task), feed())
    print(json.dumps(collector.found))


address, name, file, detector, count = sys.argv[1:]
asyncio.run(main(Path(file).read_bytes(), address, name, detector, int(count)))
