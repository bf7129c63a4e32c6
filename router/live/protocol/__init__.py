"""OpenAI's realtime protocol for transcription: its events, its session object, and their order."""
