"""LiteLLM's SDK: URL, file. Prints what its transcription calls give."""

import asyncio
import json
import sys

import litellm
import openai

url, path = sys.argv[1:]
usual = {"api_base": f"{url}/v1", "api_key": "none"}


def create(**options):
    with open(path, "rb") as file:
        return litellm.transcription(file=file, **usual, **options)


async def acreate(file):
    return await litellm.atranscription(model="openai/whisper-1", file=file, **usual)


verbose = create(
    model="openai/whisper-1",
    response_format="verbose_json",
    timestamp_granularities=["word", "segment"],
)
with open(path, "rb") as audio:
    later = asyncio.run(acreate(audio))
try:
    create(model="openai/none-such")
    refused = None
except openai.NotFoundError as error:
    refused = str(error)
print(
    json.dumps(
        {
            "text": create(model="openai/whisper-1").text,
            "vllm": create(model="hosted_vllm/whisper-1").text,
            "async": later.text,
            "verbose": verbose.text,
            "words": [word["word"] for word in verbose["words"]],
            "srt": create(model="openai/whisper-1", response_format="srt").text,
            "refused": refused,
        }
    )
)
