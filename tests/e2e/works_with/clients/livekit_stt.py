"""LiveKit agents' speech to text of whole utterances: URL, wav file."""

import asyncio
import json
import sys
import wave

from livekit import rtc
from livekit.plugins import openai

url, path = sys.argv[1:]


async def main() -> None:
    with wave.open(path) as file:
        samples = file.readframes(file.getnframes())
        frame = rtc.AudioFrame(samples, file.getframerate(), 1, file.getnframes())
    heard = {}
    for model in ("whisper-1", "gpt-4o-mini-transcribe"):
        stt = openai.STT(base_url=f"{url}/v1", api_key="none", model=model, use_realtime=False)
        event = await stt.recognize(frame)
        heard[model] = event.alternatives[0].text
        await stt.aclose()
    print(json.dumps({"text": heard["whisper-1"], "newer": heard["gpt-4o-mini-transcribe"]}))


asyncio.run(main())
