"""Pipecat's speech to text of whole utterances, in a pipeline of its own: URL, wav file."""

import asyncio
import json
import sys
import wave

from pipecat.frames.frames import (
    EndFrame,
    InputAudioRawFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.stt import OpenAISTTService

url, path = sys.argv[1:]


class Collector(FrameProcessor):
    def __init__(self) -> None:
        super().__init__()
        self.texts = []
        self.heard = asyncio.Event()

    async def process_frame(self, frame, direction) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TranscriptionFrame):
            self.texts.append(frame.text)
            self.heard.set()
        await self.push_frame(frame, direction)


async def main() -> None:
    with wave.open(path) as file:
        rate, samples = file.getframerate(), file.readframes(file.getnframes())
    settings = OpenAISTTService.Settings(model="whisper-1")
    stt = OpenAISTTService(base_url=f"{url}/v1", api_key="none", settings=settings)
    collector = Collector()
    task = PipelineTask(
        Pipeline([stt, collector]), params=PipelineParams(audio_in_sample_rate=rate)
    )
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    await task.queue_frame(VADUserStartedSpeakingFrame())
    step = rate // 50 * 2  # 20 ms
    for start in range(0, len(samples), step):
        await task.queue_frame(InputAudioRawFrame(samples[start : start + step], rate, 1))
    await task.queue_frame(VADUserStoppedSpeakingFrame())
    await asyncio.wait_for(collector.heard.wait(), 60)
    await task.queue_frame(EndFrame())
    await asyncio.wait_for(running, 60)
    print("\n" + json.dumps({"text": " ".join(collector.texts)}))


asyncio.run(main())
