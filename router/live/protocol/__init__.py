"""OpenAI's realtime protocol for transcription sessions."""
