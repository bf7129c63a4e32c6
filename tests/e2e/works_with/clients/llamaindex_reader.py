"""LlamaIndex's reader of audio: URL, file."""

import asyncio
import json
import sys

from llama_index.readers.whisper import WhisperReader

url, path = sys.argv[1:]
reader = WhisperReader(api_key="none", client_kwargs={"base_url": f"{url}/v1"})
(document,) = reader.load_data(path)
(later,) = asyncio.run(reader.aload_data(path))
print(json.dumps({"text": document.text, "async": later.text}))
