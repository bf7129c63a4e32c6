"""LiveKit agents' realtime STT: BASE_URL, MODEL, PCM (int16, 24 kHz), WORDS to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from livekit import rtc
from livekit.agents import stt, utils
from livekit.plugins import openai

RATE, PIECE = 24_000, 1_200  # 50 ms


async def main(pcm: bytes, base_url: str, model: str, words: int) -> None:
    found: dict[str, list[str]] = {"finals": [], "interims": [], "kinds": []}
    async with utils.http_context.open():
        transcriber = openai.STT(
            base_url=base_url, api_key="none", model=model, use_realtime=True, language="en"
        )
        stream = transcriber.stream()
        listening = asyncio.create_task(listen(stream, found, words))
        for start in range(0, len(pcm), 2 * PIECE):
            piece = pcm[start : start + 2 * PIECE]
            stream.push_frame(rtc.AudioFrame(piece, RATE, 1, len(piece) // 2))
            await asyncio.sleep(PIECE / RATE)
        try:
            with contextlib.suppress(TimeoutError):  # what came is told all the same
                await asyncio.wait_for(listening, 60)
        finally:
            await stream.aclose()
            await transcriber.aclose()
    print(json.dumps(found))


async def listen(stream: stt.SpeechStream, found: dict[str, list[str]], words: int) -> None:
    async for event in stream:
        found["kinds"].append(event.type.value)
        if event.type == stt.SpeechEventType.FINAL_TRANSCRIPT:
            found["finals"].append(event.alternatives[0].text)
        elif event.type == stt.SpeechEventType.INTERIM_TRANSCRIPT:
            found["interims"].append(event.alternatives[0].text)
        elif (
            event.type == stt.SpeechEventType.RECOGNITION_USAGE
            and len(" ".join(found["finals"]).split()) >= words
        ):
            return


address, name, file, count = sys.argv[1:]
asyncio.run(main(Path(file).read_bytes(), address, name, int(count)))
