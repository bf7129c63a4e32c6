"""Haystack's component of OpenAI's transcriptions, in a pipeline: URL, file."""

import json
import sys

from haystack import Pipeline
from haystack.utils import Secret
from haystack_integrations.components.audio.whisper import RemoteWhisperTranscriber

url, path = sys.argv[1:]
pipeline = Pipeline()
pipeline.add_component(
    "whisper",
    RemoteWhisperTranscriber(api_key=Secret.from_token("none"), api_base_url=f"{url}/v1"),
)
(document,) = pipeline.run({"whisper": {"sources": [path]}})["whisper"]["documents"]
print(json.dumps({"text": document.content}))
