"""The programs that are run against a server, as rows of `configs/WORKS-WITH.md`."""

from __future__ import annotations

from tests.support.environments import Program

LITELLM = Program("litellm", ("litellm[proxy]==1.100.0",))
LANGCHAIN = Program("langchain", ("langchain-community==0.4.2", "openai==3.54.0", "pydub==0.25.1"))
LLAMAINDEX = Program("llamaindex", ("llama-index-readers-whisper==0.5.0",))
HAYSTACK = Program("haystack", ("whisper-haystack==2.0.0", "haystack-ai==3.3.0"))
LIVEKIT = Program("livekit", ("livekit-plugins-openai==1.8.9", "livekit-agents==1.8.9"))
PIPECAT = Program("pipecat", ("pipecat-ai[openai]==1.14.0",))
WYOMING = Program("wyoming", ("wyoming-openai==0.8.0",), python=(3, 12))

INSTALLED = (LITELLM, LANGCHAIN, LLAMAINDEX, HAYSTACK, LIVEKIT, PIPECAT, WYOMING)
