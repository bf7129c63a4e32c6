"""What Home Assistant does: an utterance over Wyoming's protocol. URI, wav file."""

import asyncio
import json
import sys
import wave

from wyoming.asr import Transcribe, Transcript
from wyoming.audio import wav_to_chunks
from wyoming.client import AsyncClient
from wyoming.info import Describe, Info

uri, path = sys.argv[1:]


async def main() -> None:
    async with AsyncClient.from_uri(uri) as client:
        await client.write_event(Describe().event())
        event = await asyncio.wait_for(client.read_event(), 30)
        (program,) = Info.from_event(event).asr
        model = program.models[0].name
        await client.write_event(Transcribe(name=model, language="en").event())
        with wave.open(path) as file:
            for chunk in wav_to_chunks(file, 1024, start_event=True, stop_event=True):
                await client.write_event(chunk.event())
        while event := await asyncio.wait_for(client.read_event(), 60):
            if Transcript.is_type(event.type):
                print(json.dumps({"text": Transcript.from_event(event).text, "model": model}))
                return


asyncio.run(main())
