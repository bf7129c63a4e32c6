"""LangChain's loader of audio: URL, file."""

import json
import sys

from langchain_community.document_loaders.parsers.audio import OpenAIWhisperParser
from langchain_core.documents.base import Blob

url, path = sys.argv[1:]
parser = OpenAIWhisperParser(api_key="none", base_url=f"{url}/v1", model="whisper-1")
documents = list(parser.lazy_parse(Blob.from_path(path)))
print("\n" + json.dumps({"text": " ".join(document.page_content for document in documents)}))
